"""Errors that are found without waiting for a device."""

import functools

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import fusionrt as frt
from fusionrt import deferred, reference
from fusionrt.ops.cross_entropy_rows import reduced


@pytest.mark.gpu
@pytest.mark.parametrize("wrong", [5, -1, 2**40])
def test_classes_out_of_range_do_not_end_the_process(wrong):
    deferred.examine(wait=True)
    x, target = (
        torch.randn(4, 5, device="cuda", requires_grad=True),
        torch.tensor([0, wrong, -100, 1], device="cuda"),
    )
    out = frt.cross_entropy(x, target)
    (grad,) = torch.autograd.grad(out, x)
    assert out.isnan()
    assert (grad[1] == 0).all()
    torch.cuda.synchronize()
    with pytest.raises(IndexError, match=r"cross_entropy: target must be in \[0, 5\) .* got 1 other value"):
        frt.cross_entropy(x, target.clamp(0, 4))
    found = frt.cross_entropy(x, target, reduction="none")
    assert found.isnan().tolist() == [False, True, False, False]
    with pytest.raises(IndexError, match="cross_entropy"):
        deferred.examine(wait=True)
    deferred.examine(wait=True)  # each is raised once
    torch.testing.assert_close(
        *(f(x, target.clamp(0, 4)) for f in (frt.cross_entropy, reference.cross_entropy))
    )


@pytest.mark.gpu
def test_a_long_queue_of_counts():
    """More calls than counts may be on their way, behind a device that is busy."""
    deferred.examine(wait=True)
    x, target = torch.randn(4, 5, device="cuda"), torch.tensor([0, 1, 2, 7], device="cuda")
    torch.cuda._sleep(10**8)
    with pytest.raises(IndexError, match="got 1 other value"):
        for _ in range(deferred.ON_THEIR_WAY + 2):
            frt.cross_entropy(x, target)
    for _ in range(deferred.ON_THEIR_WAY + 2):
        try:
            deferred.examine(wait=True)
            break
        except IndexError:
            continue


@pytest.mark.gpu
@pytest.mark.parametrize("requires_grad", [False, True])
def test_targets_at_any_address(requires_grad):
    """Labels moved on by one, as of language models, do not begin at a multiple of 16 bytes."""
    x, labels = torch.randn(4, 5, device="cuda", requires_grad=requires_grad), torch.arange(5, device="cuda")
    torch.testing.assert_close(frt.cross_entropy(x, labels[1:]), reference.cross_entropy(x, labels[1:]))
    labels[2] = 7
    assert frt.cross_entropy(x, labels[1:]).isnan()
    with pytest.raises(IndexError, match="got 1 other value"):
        deferred.examine(wait=True)


def test_counts_beside_operands_at_any_address():
    """A kernel's memory on the host is no operand from another device (here: meta, for a GPU)."""
    operator = reduced(("input", "target", "ignore_index"), False, True, None)
    logits, target = torch.empty(4, 5, device="meta"), torch.empty(4, 1, dtype=torch.int64, device="meta")
    count = torch.empty((), dtype=torch.int64)
    assert operator.misaligned(logits, target, -100, count).shape == ()
    with pytest.raises(ValueError, match="all tensors must be on one device"):
        operator.over({}).misaligned(logits, target, -100, count)


@pytest.mark.parametrize("way", [
    lambda x, t: torch.func.grad(lambda a: frt.cross_entropy(a, t))(x),
    lambda x, t: torch.vmap(frt.cross_entropy)(x.expand(2, 3, 5), torch.stack([t.clamp(max=4), t])),
    lambda x, t: torch.vmap(torch.func.grad(frt.cross_entropy))(x.expand(2, 3, 5), torch.stack([t, t])),
    lambda x, t: make_fx(lambda a: frt.cross_entropy(a, t))(x)],
    ids=["grad", "vmap", "vmap of grad", "make_fx"])
def test_classes_out_of_range_under_transforms_and_modes(way):
    x, target = torch.randn(3, 5), torch.tensor([0, 9, 1])
    with pytest.raises(IndexError, match=r"target must be in \[0, 5\) .* got 1 other value"):
        way(x, target)
    way(x, target.clamp(max=4))


def test_places_made_in_inference_mode(monkeypatch):
    """They serve afterwards as well."""
    monkeypatch.setattr(torch, "full", functools.partial(_unpinned, torch.full))
    with torch.inference_mode():
        host = deferred._Host()
    assert host.places[3].copy_(torch.tensor(2)) == host.counts[3] == 2


def _unpinned(full, *args, pin_memory, **options):
    return full(*args, **options)
