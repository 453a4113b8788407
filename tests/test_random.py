"""Random numbers: a mask follows from torch's generator, on every device, in any company."""

import itertools
import os
import subprocess
import sys
import threading

import numpy as np
import pytest
import torch

import fusionrt as frt
from fusionrt import random

P = 0.5


def mask(x, p=P):
    """Which elements a dropout keeps."""
    return frt.relu_dropout(x, p) != 0


def ones(*shape, device="cpu", dtype=torch.float32):
    return torch.ones(shape, device=device, dtype=dtype)


def same(a, b):
    return torch.equal(a.cpu(), b.cpu())


def test_the_seed_decides(device):
    x = ones(64, 64, device=device)
    torch.manual_seed(7)
    first, second = mask(x), mask(x)
    torch.manual_seed(7)
    assert same(mask(x), first)
    assert same(mask(x), second)
    assert not same(first, second)
    torch.manual_seed(8)
    assert not same(mask(x), first)
    for seed in (0, 2**63, -1, 2**64 - 1):
        torch.manual_seed(seed)
        expected = mask(x)
        torch.manual_seed(seed)
        assert same(mask(x), expected)
        assert not same(expected, first)


def test_many_calls_give_many_masks(device):
    x = ones(64, device=device)
    masks = {tuple(mask(x).tolist()) for _ in range(200)}
    assert len(masks) == 200


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
def test_probability(device, p):
    n = 1 << 18
    kept = mask(ones(n, device=device), p).float().mean().item()
    assert abs(kept - (1 - p)) <= 6 * (p * (1 - p) / n) ** 0.5


def test_neighbours_and_calls_are_uncorrelated(device):
    x = ones(1 << 18, device=device)
    masks = torch.stack([mask(x), mask(x)]).double() * 2 - 1
    bound = 6 / (1 << 9)
    assert (masks[0] * masks[1]).mean().abs() < bound
    for lag in (1, 2, 4, 8, 64, 256, 512, 1024):
        assert (masks[0][lag:] * masks[0][:-lag]).mean().abs() < bound, lag


def test_saved_state_restores_the_mask(device):
    x = ones(64, 64, device=device)
    get, put = ((torch.cuda.get_rng_state, torch.cuda.set_rng_state) if device == "cuda" else
                (torch.get_rng_state, torch.set_rng_state))
    torch.manual_seed(3)
    mask(x)
    state = get()
    first, second = mask(x), mask(x)
    put(state)
    assert same(mask(x), first)
    put(state)
    assert [same(mask(x), first), same(mask(x), second)] == [True, True]
    with torch.random.fork_rng():
        mask(x)
        torch.manual_seed(99)
        mask(x)
    put(state)
    assert same(mask(x), first)


def test_a_fork_of_the_generator_leaves_it_alone(device):
    x = ones(64, 64, device=device)
    torch.manual_seed(3)
    first, second = mask(x), mask(x)
    torch.manual_seed(3)
    assert same(mask(x), first)
    with torch.random.fork_rng():
        inside = mask(x)
    assert same(inside, second)
    assert same(mask(x), second)


def test_other_draws_between_are_part_of_the_story(device):
    """torch's own draws move the generator on: deterministic, and never the same mask again."""
    x = ones(64, 64, device=device)

    def story():
        torch.manual_seed(5)
        found = [mask(x)]
        torch.rand(3, device=device)
        found += [mask(x), mask(x)]
        torch.nn.functional.dropout(x, 0.5)
        return [*found, mask(x)]

    first, again = story(), story()
    assert all(map(same, first, again))
    assert not any(same(a, b) for a, b in itertools.combinations(first, 2))


def test_our_draws_move_torchs_generator(device):
    x = ones(64, 64, device=device)
    torch.manual_seed(5)
    before = torch.rand(4, device=device)
    torch.manual_seed(5)
    mask(x)
    assert not torch.equal(torch.rand(4, device=device), before)


def test_a_saved_state_is_the_same_in_another_process(tmp_path):
    """However it came about: after a seed, behind other draws, behind more than are counted."""
    script = """
import sys, torch, fusionrt
states = torch.load(sys.argv[1])
masks = [torch.set_rng_state(state) or fusionrt.relu_dropout(torch.ones(1000), 0.5) for state in states]
torch.save(masks, sys.argv[2])
"""
    states, masks = [], []
    torch.manual_seed(3)
    for others in (0, 3, 700, 1, random.BLOCKS * random.WORDS, 1):
        torch.rand(others)
        for _ in range(2):
            states.append(torch.get_rng_state())
            masks.append(frt.relu_dropout(torch.ones(1000), P))
    torch.save(states, tmp_path / "states")
    subprocess.run([sys.executable, "-c", script, tmp_path / "states", tmp_path / "masks"], check=True,
                   env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert all(map(torch.equal, torch.load(tmp_path / "masks"), masks))
    assert len({tuple(m.tolist()) for m in masks}) == len(masks)


def test_a_state_means_one_mask_whatever_led_to_it():
    two = frt.fuse(lambda x: frt.where(frt.kept(0.5), x, 0) + frt.where(frt.kept(0.5), x, 0))
    x = ones(1000)
    torch.manual_seed(0)
    mask(x)
    state, expected = torch.get_rng_state(), mask(x)
    torch.manual_seed(0)
    two(x)
    torch.set_rng_state(state)
    assert same(mask(x), expected)


@pytest.mark.parametrize("drawn", [0, 1, 623, 624, 625, 5000, random.BLOCKS * random.WORDS])
def test_numbers_are_counted_since_the_seed(drawn):
    generator = torch.Generator().manual_seed(2**63 + 9)
    torch.rand(drawn, generator=generator)
    assert random._counted(generator) == (2**63 + 9, drawn)


def test_beyond_what_is_counted_no_two_states_are_alike():
    torch.manual_seed(11)
    torch.rand(random.BLOCKS * random.WORDS)
    found = [random._draw_cpu(3) for _ in range(500)]
    assert len({seed for seed, _, _ in found}) > 2
    assert len({(seed, offset + k) for seed, offset, _ in found for k in range(3)}) == 1500


def test_each_draw_of_a_function_has_its_own_bits(device):
    @frt.fuse
    def two(x):
        return (frt.where(frt.kept(0.5), x, 0), frt.where(frt.kept(0.5), x, 0))

    x = ones(128, 128, device=device, dtype=torch.float64).requires_grad_()
    a, b = two(x)
    both = ((a != 0) & (b != 0)).double().mean().item()
    assert 0.23 < both < 0.27
    (g,) = torch.autograd.grad((a + 2 * b).sum(), x)
    assert torch.equal(g, (a != 0).double() + 2 * (b != 0).double())
    torch.manual_seed(1)
    one = mask(x.detach())
    torch.manual_seed(1)
    assert same(two(x.detach())[0] != 0, one)  # the first draw is that of any other function


@pytest.mark.parametrize("op", ["linear_activation", "layer_norm", "ffn"])
def test_what_an_epilogue_draws_is_drawn_beside_the_ops_own(op, device):
    """Also where the epilogue was first used without the op's dropout."""
    def dropped(y):
        return frt.where(frt.kept(0.5), y, 0)

    x, square, eye = ones(256, 64, device=device), ones(64, 64, device=device), torch.eye(64, device=device)
    uneven = x + torch.arange(64, device=device)
    calls = {
        "linear_activation": lambda p: frt.linear_activation(x, square, None, dropped, dropout_p=p),
        "ffn": lambda p: frt.ffn(x, square, None, eye, None, activation=dropped, dropout_p=p),
        "layer_norm": lambda p: frt.layer_norm(uneven, (64,), dropout_p=p, residual=torch.zeros_like(x),
                                               epilogue=dropped, return_sum=True)}
    calls[op](0.0)
    found = calls[op](0.5)
    if op == "layer_norm":  # never 0 itself
        y, s = found
        assert 0.45 < ((y != 0) == (s != 0)).float().mean() < 0.55
    else:
        assert 0.22 < (found != 0).float().mean() < 0.28


def test_the_mask_follows_the_walk(device):
    """Element k of the mask belongs to the k-th element in memory: permuting a tensor permutes its
    mask along, dtypes and broadcast partners do not matter."""
    shape = (4, 6, 5, 3)

    def seeded(x, *more):
        torch.manual_seed(2)
        return frt.dropout_add(x, *more, P) != 0 if more else mask(x)

    x = ones(*shape, device=device)
    plain = seeded(x)
    assert same(seeded(x.flatten()).view(shape), plain)
    for dtype in (torch.float16, torch.bfloat16, torch.float64):
        assert same(seeded(x.to(dtype)), plain)
    permuted = seeded(x.permute(3, 1, 0, 2))
    assert same(permuted.permute(2, 1, 3, 0), plain)
    last = seeded(x.to(memory_format=torch.channels_last))
    assert same(last.permute(0, 2, 3, 1).flatten(), plain.flatten())
    assert not same(last, plain)
    assert same(seeded(x, torch.zeros(3, device=device)), plain)
    strided = torch.ones(4, 6, 5, 6, device=device)[..., ::2]
    assert same(seeded(strided), plain)  # the output is dense, and it is walked
    assert same(seeded(x[0]).flatten(), plain.flatten()[:90])  # a longer tensor only adds elements


def test_numpy_arrays_draw_from_torchs_generator():
    x = np.ones((64, 64), np.float32)
    torch.manual_seed(4)
    expected = mask(torch.from_numpy(x))
    torch.manual_seed(4)
    ours = frt.relu_dropout(x, P)
    assert isinstance(ours, np.ndarray)
    assert np.array_equal(ours != 0, expected.numpy())


def test_backward_repeats_the_mask_whatever_happens_between(device):
    x = ones(64, 64, device=device).requires_grad_()
    y = frt.relu_dropout(x, P)
    mask(x.detach())
    torch.manual_seed(0)
    torch.rand(3, device=device)
    (g,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(g, y.detach())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="posix")
def test_a_forked_child_continues_where_its_parent_was(tmp_path):
    x = ones(64, 64)
    torch.manual_seed(6)
    mask(x)
    child = os.fork()
    if not child:
        try:
            torch.save(mask(x), tmp_path / "mask")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert same(torch.load(tmp_path / "mask"), mask(x))


def test_threads_never_share_a_mask(device):
    x, found = ones(64, 64, device=device), []

    def work():
        for _ in range(50):
            found.append(mask(x))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(found) == 400
    assert len({m.cpu().numpy().tobytes() for m in found}) == 400


@pytest.mark.gpu
def test_gpu_and_cpu_have_the_same_masks():
    found = []
    for device in ("cpu", "cuda"):
        x = ones(100, 33, device=device)
        torch.manual_seed(42)
        found.append([mask(x, p) for p in (0.5, 0.1, 0.9)])
    assert all(map(same, *found))


@pytest.mark.gpu
def test_replayed_graphs_draw_anew():
    x = ones(64, 64, device="cuda").requires_grad_()
    for _ in range(2):
        torch.autograd.grad(frt.relu_dropout(x, P).sum(), x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = frt.relu_dropout(x, P)
        z = frt.relu_dropout(x, P)
        (g,) = torch.autograd.grad(y.sum(), x)
    found = []
    for _ in range(5):
        graph.replay()
        assert torch.equal(g, y.detach())
        found += [y.detach() != 0, z.detach() != 0]
    assert not any(same(a, b) for a, b in itertools.combinations(found, 2))
    torch.cuda.manual_seed(1)
    graph.replay()
    first = y.detach().clone()
    torch.cuda.manual_seed(1)
    graph.replay()
    assert torch.equal(y.detach(), first)
    mask(x.detach())  # eager draws go on


@pytest.mark.gpu
def test_one_draw_serves_a_stream_of_a_captured_graph():
    """Others follow by their offset; what is on another stream need not come after it."""
    x = ones(64, 64, device="cuda")
    mask(x)
    kept = []
    for _ in range(2):
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph):
            here = [random.draw(x.device, 3) for _ in range(2)]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                there = random.draw(x.device, 1)
                apart = mask(x)
            masks = [mask(x) for _ in range(3)]
            torch.cuda.current_stream().wait_stream(side)
        assert here[0][2] is here[1][2] and here[0][2] is not there[2]
        assert [rng[1] for rng in (*here, there)] == [0, 3, 0]
        assert not kept or here[0][2] is not kept[0]
        kept[:] = [here[0][2], graph, masks, apart]
        for _ in range(3):
            graph.replay()
            assert not any(same(a, b) for a, b in itertools.combinations([*masks, apart], 2))


@pytest.mark.gpu
def test_a_call_advances_the_generator_as_one_counter_does():
    x = ones(64, device="cuda")
    generator = torch.cuda.default_generators[torch.cuda.current_device()]
    torch.manual_seed(1)
    assert generator.get_offset() == 0
    mask(x)
    assert generator.get_offset() == 4


def test_a_state_is_known_long_after():
    """A checkpoint comes back to it."""
    torch.manual_seed(1)
    frt.relu_dropout(torch.ones(4), 0.5)
    state = torch.get_rng_state()
    expected = frt.relu_dropout(torch.ones(1000), 0.5)
    for _ in range(4500):
        frt.relu_dropout(torch.ones(4), 0.5)
    torch.set_rng_state(state)
    assert torch.equal(frt.relu_dropout(torch.ones(1000), 0.5), expected)


def test_whoever_draws_in_the_middle_of_a_draw(monkeypatch):
    """As finalizers and handlers of signals do: it waits for nothing, and nobody draws the same."""
    own, inner = random._counted, []

    def interrupted(generator):
        found = own(generator)
        if not inner:
            inner.append(None)
            inner[0] = random._draw_cpu(10)
        return found

    monkeypatch.setattr(random, "_counted", interrupted)
    torch.manual_seed(5)
    outer = random._draw_cpu(10)
    assert [inner[0][:2], outer[:2]] == [(5, 0), (5, 10)]
