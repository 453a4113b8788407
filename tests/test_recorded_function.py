"""Backward passes that repeat an earlier one: whatever changes between two of them is noticed."""

import threading

import pytest
import torch
from checking import F64, frames
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt import guards, recorded_function, settling
from fusionrt.recording import recording_of


def randn(*shape, device, requires_grad=True):
    return torch.randn(shape, dtype=F64, device=device).requires_grad_(requires_grad)


@frt.fuse
def scaled_product(x, y, by: float):
    return x * y * by


def test_the_second_pass_repeats_the_first(device):
    x, y = randn(5, 7, device=device), randn(7, device=device)
    for by in (2.0, 3.0, 4.0):  # numbers may differ
        grad_output = randn(5, 7, device=device, requires_grad=False)
        grads = torch.autograd.grad(scaled_product(x, y, by), (x, y), grad_output)
        assert_close(grads, torch.autograd.grad(x * y * by, (x, y), grad_output))
    assert len(recording_of(scaled_product.operator, (x, y, 2.0)).passes) == 1


@pytest.mark.parametrize("change", [
    lambda g: g.t().contiguous().t(), lambda g: g[:1].expand(g.shape), lambda g: g[:, :1].expand(g.shape),
    lambda g: torch.zeros(g.shape, dtype=g.dtype, device=g.device)[..., None].expand(*g.shape, 2)[..., 1]])
def test_gradients_in_another_layout(change, device):
    x, y = randn(6, 6, device=device), randn(6, device=device)
    for make in (lambda g: g, change, lambda g: g):
        grad_output = make(randn(6, 6, device=device, requires_grad=False))
        grads = torch.autograd.grad(frt.bias_gelu(x, y), (x, y), grad_output)
        assert_close(grads, torch.autograd.grad(F.gelu(x + y), (x, y), grad_output))


def test_calls_of_several_kinds_take_turns(device):
    kinds = [(randn(*shape, device=device), randn(shape[1], device=device)) for shape in ((4, 6), (3, 5))]
    for _ in range(3):
        for x, y in kinds:
            seed = randn(*x.shape, device=device, requires_grad=False)
            for g in (seed, seed.t().contiguous().t()):
                assert_close(torch.autograd.grad(scaled_product(x, y, 2.0), (x, y), g),
                             torch.autograd.grad(x * y * 2, (x, y), g))
    for x, y in kinds:
        assert len(recording_of(scaled_product.operator, (x, y, 2.0)).passes) == 2


def test_other_arguments_need_a_gradient(device):
    x, y = randn(4, 6, device=device), randn(6, device=device)
    for wanted in ((x, y), (x,), (y,), (x, y), (y,)):
        grads = torch.autograd.grad(frt.bias_gelu(x, y).sum(), wanted)
        assert_close(grads, torch.autograd.grad(F.gelu(x + y).sum(), wanted))
    frozen = y.detach()
    assert_close(torch.autograd.grad(frt.bias_gelu(x, frozen).sum(), x),
                 torch.autograd.grad(F.gelu(x + frozen).sum(), x))


def test_one_tensor_in_two_places_is_known_again(device):
    x, y, z = (randn(4, 6, device=device) for _ in range(3))
    check = guards.guard(x, y, x)
    assert check(x, y, x) and check(z, y, z)
    assert not check(x, y, z) and not check(y, y, y) and not check(x, y, 1.0)
    for _ in range(3):
        out = scaled_product(x, x, 2.0)
        grad_output = randn(4, 6, device=device, requires_grad=False)
        assert_close(torch.autograd.grad(out, x, grad_output), torch.autograd.grad(x * x * 2, x, grad_output))
    assert len(recording_of(scaled_product.operator, (x, x, 2.0)).passes) == 1


def test_some_outputs_have_no_gradient(device):
    x, r, w, b = (randn(*s, device=device) for s in ((4, 6), (4, 6), (6,), (6,)))
    for use in ((0, 1), (0,), (1,), (0, 1), (1,)):
        ours = frt.add_norm(x, r, w, b)
        theirs = F.layer_norm(x + r, (6,), w, b), x + r
        wanted = (x, r, w, b) if 0 in use else (x, r)
        grads, expected = (torch.autograd.grad(sum(y[k].sin().sum() for k in use), wanted)
                           for y in (ours, theirs))
        assert_close(grads, expected)


def test_second_derivatives_after_first_ones(device):
    x, y = randn(4, 6, device=device), randn(6, device=device)
    for create_graph in (False, True, False, True):
        grads, expected = (torch.autograd.grad(f.sin().sum(), (x, y), create_graph=create_graph)
                           for f in (frt.bias_gelu(x, y), F.gelu(x + y)))
        assert_close(grads, expected)
        if create_graph:
            assert_close(*(torch.autograd.grad(sum(g.square().sum() for g in each), (x, y))
                           for each in (grads, expected)))


def test_saved_tensors_that_went_elsewhere(device):
    x, y = randn(4, 6, device=device), randn(6, device=device)
    for offload in (False, True, False):
        with torch.autograd.graph.save_on_cpu() if offload else torch.enable_grad():
            out = frt.bias_gelu(x, y)
        assert_close(torch.autograd.grad(out.sum(), (x, y)), torch.autograd.grad(F.gelu(x + y).sum(), (x, y)))


def test_dropout_draws_anew(device):
    x = torch.ones(1000, device=device, requires_grad=True)
    masks = []
    for _ in range(3):
        y = frt.gelu_dropout(x, 0.5)
        g, = torch.autograd.grad(y.sum(), x)
        assert torch.equal(g != 0, y != 0)
        masks.append(g != 0)
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_batched_gradients_after_plain_ones(device):
    x, y = randn(4, 6, device=device), randn(6, device=device)
    out, expected = frt.bias_gelu(x, y), F.gelu(x + y)
    grad_outputs = randn(3, 4, 6, device=device, requires_grad=False)
    for batched in (False, True, False):
        seed = grad_outputs if batched else grad_outputs[0]
        assert_close(*(torch.autograd.grad(f, (x, y), seed, retain_graph=True, is_grads_batched=batched)
                       for f in (out, expected)))


def test_threads_keep_their_own(device):
    def work(k):
        x, y = randn(k + 2, 6, device=device), randn(6, device=device)
        for _ in range(20):
            assert_close(torch.autograd.grad(frt.bias_gelu(x, y).sum(), (x, y)),
                         torch.autograd.grad(F.gelu(x + y).sum(), (x, y)))
        done.append(k)

    done = []
    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert sorted(done) == [0, 1, 2, 3]


@pytest.mark.parametrize("settles", [False, True])
def test_threads_that_meet_a_kind_at_once(settles):
    """Each its own, of one call: none may run what another one keeps."""
    for n in range(20, 30) if settles else range(30, 40):
        x = torch.randn(n, n, dtype=F64, requires_grad=True)
        seeds = torch.randn(n, n, dtype=F64), torch.randn(n, n, dtype=F64).t()
        out = frt.silu(x)
        recording = recording_of(frt.silu.operator, (x,))
        both, wrong = threading.Barrier(2), []

        def work(g, x=x, out=out, both=both, wrong=wrong, recording=recording):
            expected, = torch.autograd.grad(F.silu(x), x, g)
            both.wait()
            for _ in range(3):
                grad, = torch.autograd.grad(out, x, g, retain_graph=True)
                if settles:
                    recording.settle()
                both.wait()
                wrong.append(float((grad - expected).abs().max()))

        threads = [threading.Thread(target=work, args=(g,)) for g in seeds]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert len(wrong) == 6 and max(wrong) < 1e-12
        assert len({known.thread for known in recording.passes}) == len(recording.passes) == 2


def test_threads_that_are_no_more_shut_nobody_out():
    x = torch.randn(4, 6, dtype=F64, requires_grad=True)
    out, ends = frt.silu(x), threading.Event()

    def work():
        torch.autograd.grad(out.sum(), x, retain_graph=True)
        ends.wait(60)

    threads = [threading.Thread(target=work) for _ in range(40)]
    for t in threads:
        t.start()
    ends.set()
    for t in threads:
        t.join()
    torch.autograd.grad(out.sum(), x, retain_graph=True)
    passes = recording_of(frt.silu.operator, (x,)).passes
    assert len(passes) <= recorded_function._KEPT_BY_ALL and passes[-1].thread == threading.get_ident()


def test_a_number_in_a_tensors_place_does_not_stay():
    x = torch.randn(4)
    for _ in range(3):
        assert_close(frt.leaky_relu(-2.0, x), F.leaky_relu(torch.tensor(-2.0), 1.0) * x)
    for _ in range(2):
        assert_close(frt.leaky_relu(x, 0.1), F.leaky_relu(x, 0.1))


def test_a_recording_that_is_made_after_calls_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settling, "SETTLED_AFTER", 2)
    x = torch.randn(5, 7, requires_grad=True)
    add_relu = frt.fuse(lambda a, b: frt.relu(a + b))
    for is_recorded in (False, True, False):
        with torch.set_grad_enabled(is_recorded):
            for _ in range(8):
                out = add_relu(x, x)
                assert out.requires_grad == is_recorded
                assert_close(out, torch.relu(x + x))
        if is_recorded:
            assert_close(torch.autograd.grad(out.sum(), x)[0], 2.0 * (x > 0))
    called = frames(lambda: add_relu(x, x))
    assert "_first" not in called and "recorded" not in called
