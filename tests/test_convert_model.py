"""A converted module is what the original was, on the same tensors; what was replaced is proved or undone."""

import collections
import copy
import dataclasses
import functools
import inspect
import json
import math
import pickle
import sys
from pathlib import Path

import pytest
import torch
from convert_net import Net, X, assert_same, installed_passes, one_thread, replaced_by, small_net  # noqa: F401  (fixtures)
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import fusionrt as frt
from fusionrt import convert
from fusionrt.convert.inputs import Inputs, find, varied
from fusionrt.convert.model import record_of
from fusionrt.convert.validate import ValidationError, leaves


def converted(model, *args, **kwargs):
    """Captured and run as it is, unless there are `passes`."""
    return frt.auto_convert_model(model, *args, **{"validate_accuracy": False, "passes": (), **kwargs})


# --- what a converted module is -------------------------------------------------------------------


def test_same_class_same_tensors_and_the_original_as_it_was(net):
    before, expected = dict(vars(net)), net(X)
    fast = converted(net)
    assert type(fast) is Net
    assert list(fast.state_dict()) == list(net.state_dict())
    assert [id(p) for p in fast.parameters()] == [id(p) for p in net.parameters()]
    assert [id(b) for b in fast.buffers()] == [id(b) for b in net.buffers()]
    assert fast.first is not net.first
    assert fast.layers[0] is fast.first
    assert fast.second.weight is fast.first.weight
    assert_same(fast(X), expected)
    assert vars(net) == before
    assert "forward" not in vars(net)
    assert torch.equal(net(X), expected)
    assert repr(fast) == repr(net)
    assert str(inspect.signature(fast.forward)) == "(x, *, bias=0.0)"


def test_a_model_beside_the_model_is_not_copied(net):
    net.teacher = [Net()]  # out of sight of `modules`
    fast = converted(net)
    assert fast.teacher is not net.teacher
    assert fast.teacher[0] is net.teacher[0]


def test_an_update_of_the_parameters_is_seen_by_both(net):
    fast = converted(net)
    fast(X)
    with torch.no_grad():
        net.first.weight.mul_(2)
    net.load_state_dict({**net.state_dict(), "norm.running_mean": torch.full((8,), 0.3)})
    assert_same(fast(X), net(X))


def test_arguments_by_name_and_gradients(net):
    fast = converted(net)
    got, own = fast(X, bias=torch.ones(8)), net(X, bias=torch.ones(8))
    assert_same(got, own)
    parameters = list(net.parameters())
    assert_same(torch.autograd.grad(got.sum(), parameters), torch.autograd.grad(own.sum(), parameters))


class Returns(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(8, 8)

    def forward(self, x):
        return self.kind(torch.relu(self.linear(x)), x * 2)


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Data:
    a: torch.Tensor
    b: torch.Tensor


@pytest.mark.parametrize("kind", [
    lambda a, b: (a, b), lambda a, b: [a, {"b": b}], lambda a, b: {"a": a, "b": None}, Pair, Data],
    ids=["tuple", "list", "dict", "namedtuple", "dataclass"])
def test_outputs_keep_their_types(kind):
    model = Returns(kind)
    got, own = frt.auto_convert_model(model, example_inputs=X)(X), model(X)
    assert type(got) is type(own)
    assert [name for name, _ in leaves(got)] == [name for name, _ in leaves(own)]
    assert_same([t for _, t in leaves(got)], [t for _, t in leaves(own)])


class Counted:
    """A hook that must not be copied, and does not know what it hangs on."""

    def __init__(self):
        self.seen = []

    def __call__(self, module, args, output):
        self.seen.append(type(module).__name__)

    def doubled(self, module, args, output):
        return output * 2


def test_hooks_run_wherever_they_come_from(net):
    hook = Counted()
    handle = net.norm.register_forward_hook(hook)
    fast = converted(net)
    fast(X)
    assert hook.seen == ["BatchNorm1d"]
    handle.remove()  # the original's
    fast(X)
    net(X)
    assert hook.seen == ["BatchNorm1d"] * 2

    plain = converted(net)
    expected = plain(X)
    later = plain.second.register_forward_hook(hook.doubled)
    assert_same(plain(X), 2 * expected)
    later.remove()
    assert_same(plain(X), expected)
    assert_same(net(X), expected)


def test_a_hook_that_is_a_method_of_the_model_concerns_the_clone():
    class Normed(nn.Linear):
        def __init__(self):
            super().__init__(8, 8)
            self.calls = 0
            self.register_forward_pre_hook(self.count)

        def count(self, module, args):
            self.calls += 1

    model = Normed()
    fast = converted(model)
    fast(X)
    assert (model.calls, fast.calls) == (0, 1)


def test_training_updates_statistics_and_gives_eager_gradients():
    """50 steps, each of them from the same state: what is compared is not chaos."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 4))
    other = copy.deepcopy(model)
    fast = converted(other, passes=None).train()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, other)]
    for _ in range(50):
        x, y = torch.randn(8, 3, 8, 8), torch.randint(4, (8,))
        for m, optimizer in zip((model, fast), optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(m(x), y).backward()
            optimizer.step()
    assert_same(dict(other.named_parameters()), dict(model.named_parameters()), rtol=1e-4, atol=1e-5)
    assert_same(fast[1].running_mean, model[1].running_mean, rtol=1e-4, atol=1e-5)
    assert int(other[1].num_batches_tracked) == 50
    assert_same(fast.eval()(x), model.eval()(x), rtol=1e-4, atol=1e-4)


# --- moved, copied, wrapped -----------------------------------------------------------------------


def test_a_cast_leaves_the_original_alone(net):
    expected = net(X)
    fast = converted(net)
    (fast.first.weight.sum() * 2).backward()
    assert fast.float() is fast
    assert fast.first.weight is net.first.weight, "nothing was to be done"
    fast.double()
    assert {p.dtype for p in net.parameters()} == {torch.float32}
    assert net.first.weight.grad.dtype == torch.float32
    assert {p.dtype for p in fast.parameters()} == {torch.float64}
    assert fast.second.weight is fast.first.weight, "still tied"
    assert fast.first.weight.grad.dtype == torch.float64
    assert torch.equal(net(X), expected)
    assert_same(fast(X.double()), expected.double(), rtol=1e-5, atol=1e-6)


def test_a_cast_of_the_original_is_one_of_both(net):
    fast = converted(net)
    fast(X)
    net.double()
    assert {t.dtype for t in (*fast.parameters(), *fast.buffers())} == {torch.float64, torch.int64}
    assert_same(fast(X.double()), net(X.double()))
    net.scale = net.scale * 2
    assert fast.scale is net.scale
    fast.float()
    assert net.scale.dtype == torch.float64


@pytest.mark.gpu
def test_a_move_of_the_original_is_one_of_both(net):
    fast = converted(net)
    net.cuda()
    assert_same(fast(X.cuda()), net(X.cuda()))


@pytest.mark.gpu
def test_a_move_leaves_the_original_alone(net):
    fast = converted(net).cuda()
    assert fast(X.cuda()).is_cuda
    assert_same(fast(X.cuda()).cpu(), net(X), rtol=1e-4, atol=1e-5)
    moved = converted(net, device="cuda")
    assert {p.device.type for p in moved.parameters()} == {"cuda"}
    assert {p.device.type for p in net.parameters()} == {"cpu"}


class Picklable(nn.Sequential):
    pass


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "pickle"])
def test_copies_are_converted_too(copied):
    model = Picklable(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    fast = frt.auto_convert_model(model, example_inputs=X)
    other = copied(fast)
    assert type(other) is Picklable
    assert other.forward.module is other
    assert other[0].weight is not model[0].weight
    assert_same(other(X), model(X))
    assert len(other.forward.graphs) == 1
    assert record_of(other).verdict == record_of(fast).verdict


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))],
                         ids=["deepcopy", "pickle"])
def test_copies_made_before_the_first_call_are_proven_as_well(copied):
    model = Picklable(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    fast = frt.auto_convert_model(model)
    other = copied(fast)
    other(X)
    assert record_of(other).verdict.accepted and record_of(fast).verdict is None
    fast(X)
    assert record_of(fast).verdict.accepted


def test_a_proof_that_failed_is_tried_again():
    fast = frt.auto_convert_model(nn.Linear(8, 2))
    with pytest.raises(ValueError, match="the model itself fails"):
        fast(torch.randn(3, 5))
    assert record_of(fast).verdict is None
    fast(X)
    assert record_of(fast).verdict.accepted


def test_in_ddp(net, tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        fast = converted(net)
        wrapped = nn.parallel.DistributedDataParallel(fast)
        wrapped(X).sum().backward()
        got = [p.grad.clone() for p in net.parameters()]
        net.zero_grad()
        net(X).sum().backward()
        assert_same(got, [p.grad for p in net.parameters()])
    finally:
        torch.distributed.destroy_process_group()


def test_inside_somebody_elses_compilation(net):
    assert_same(torch.compile(converted(net), backend="eager")(X), net(X))


def test_what_is_converted_already_is_converted_again(net):
    again = converted(converted(net))
    assert_same(again(X), net(X))
    assert not isinstance(again.forward.own, type(again.forward))


def test_more_models_of_a_class_than_dynamo_compiles_of_one_function():
    for _ in range(torch._dynamo.config.recompile_limit + 2):
        fast = converted(nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        fast(X)
        assert len(fast.forward.graphs) == 1


# --- errors ---------------------------------------------------------------------------------------


class Untraceable(nn.Module):
    def forward(self, x):
        raise RuntimeError("no such luck")


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: frt.auto_convert_model(print), TypeError,
     "model must be a torch.nn.Module, got builtin_function_or_method"),
    (lambda: frt.auto_convert_model(torch.jit.script(nn.Linear(2, 2))), TypeError, "model is TorchScript"),
    (lambda: frt.auto_convert_model(torch.compile(nn.Linear(2, 2))), TypeError,
     "model is wrapped in OptimizedModule; convert the module inside"),
    (lambda: frt.auto_convert_model(nn.LazyLinear(2)), ValueError, "weight, bias of model have no shape yet"),
    (lambda: frt.auto_convert_model(nn.Linear(8, 8), "1x8"), TypeError,
     "input_shape must be a shape such as (1, 3, 224, 224), or a list of shapes, one for each argument, "
     "got '1x8'"),
    (lambda: frt.auto_convert_model(nn.Linear(8, 8), (1, 9)), ValueError,
     "Linear takes no inputs of input_shape=(1, 9); give example_inputs. Tried:\n  (float32 [1, 9]): "),
    (lambda: frt.auto_convert_model(Untraceable(), example_inputs=X), ValueError,
     "the model itself fails with (float32 [16, 8]): RuntimeError: no such luck"),
    (lambda: convert.ModelConverter(passes=["nope"]), ValueError, "no pass is called 'nope'; there are "),
    (lambda: convert.ModelConverter(passes="norm"), TypeError, "passes must be a list of names, got 'norm'"),
    (lambda: convert.ModelConverter(accuracy_threshold=-1), ValueError, "must be at least 0, got -1"),
    (lambda: convert.ModelConverter(accuracy_threshold="a"), TypeError,
     "ModelConverter: accuracy_threshold must be a number, got 'a'"),
    (lambda: frt.auto_convert_model(nn.Linear(2, 2), passes=["nope"]), ValueError,
     "auto_convert_model: no pass is called 'nope'; there are "),
    (lambda: frt.auto_convert_model(nn.Linear(2, 2), device="foo"), ValueError,
     "auto_convert_model: device must name one, such as 'cpu' or 'cuda:0', got 'foo'"),
    (lambda: frt.validate_optimization(3, nn.Linear(2, 2), X), TypeError,
     "validate_optimization: original must be a module, got int"),
    (lambda: convert.load_converted(3, "x"), TypeError, "load_converted: model must be a module, got int"),
    (lambda: convert.load_converted(nn.Linear(2, 2), "none"), FileNotFoundError,
     "load_converted: there is no none.safetensors"),
    (lambda: convert.load_converted(nn.Linear(2, 2), 5), TypeError,
     "load_converted: path must be a str or a Path, got int"),
    (lambda: convert.ModelConverter().conversion_stats, ValueError, "no model has been converted yet"),
    (lambda: convert.conversion_report(nn.Linear(2, 2)), TypeError,
     "a module that auto_convert_model returned is expected, got Linear"),
])
def test_errors(call, error, message):
    with pytest.raises(error) as raised:
        call()
    assert message in str(raised.value)


def test_there_is_no_gpu(net):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(ValueError, match="device is cuda, and there is no CUDA device"):
        frt.auto_convert_model(net, device="cuda")


# --- inputs ---------------------------------------------------------------------------------------


class Tokens(nn.Module):
    def __init__(self, sizes=(50,)):
        super().__init__()
        self.tables = nn.ModuleList([nn.Embedding(size, 8) for size in sizes])
        self.linear = nn.Linear(8, 8)

    def forward(self, x, y=None):
        y = x if y is None else y
        return self.linear(sum(table(t) for table, t in zip(self.tables, (x, y), strict=False)))


def kinds(inputs):
    return [(t.dtype, tuple(t.shape)) for t in (*inputs.args, *inputs.kwargs.values())]


def test_inputs_are_found_by_trying():
    cpu = torch.device("cpu")
    assert kinds(find(nn.Linear(8, 2).bfloat16(), (3, 8), cpu)) == [(torch.bfloat16, (3, 8))]
    found = find(Tokens(), (2, 5), cpu)
    assert kinds(found) == [(torch.int64, (2, 5))]
    assert found.args[0].max() < 50
    assert kinds(find(Tokens((50, 30)), [(2, 5), (2, 5)], cpu)) == [(torch.int64, (2, 5))] * 2
    late = nn.Sequential(nn.Flatten(), Tokens())  # nothing says that it takes tokens
    assert kinds(find(late, (2, 5), cpu)) == [(torch.int64, (2, 5))]


def test_variations_keep_what_means_something():
    mask, ids = torch.tensor([[1, 1, 0]]), torch.tensor([[3, 9, 27, 3]])
    extreme, image = torch.tensor([0.0, -1e30]), torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)
    other = varied(Inputs((mask, image), {"ids": ids, "extreme": extreme, "flag": True}), 1)
    assert other.args[0] is mask
    assert other.kwargs["extreme"] is extreme
    assert other.kwargs["flag"] is True
    assert set(other.kwargs["ids"].flatten().tolist()) <= {3, 9, 27}
    assert other.args[1].is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(other.args[1], image)
    assert abs(other.args[1].std() - 1) < 0.3


def test_tensors_in_the_place_of_a_shape_are_inputs(net):
    assert record_of(frt.auto_convert_model(net, X)).verdict.accepted
    assert record_of(frt.auto_convert_model(net, (16, 8))).verdict.accepted


def test_without_inputs_the_first_call_is_the_proof(net):
    fast = frt.auto_convert_model(net)
    assert record_of(fast).verdict is None
    assert "has not been called" in str(convert.conversion_report(fast))
    assert_same(fast(X), net(X))
    assert record_of(fast).verdict.accepted
    assert record_of(fast).graphs


def test_the_proof_in_a_checkpoint(net):
    """Whose backward pass wants to see as many tensors saved as the forward pass."""
    fast = frt.auto_convert_model(net)
    found = []
    for model in (fast, net):
        x = X.clone().requires_grad_()
        checkpoint(model, x, use_reentrant=False).square().sum().backward()
        found.append(x.grad)
    assert_same(*found)
    assert record_of(fast).verdict.accepted


# --- statistics, reports, files -------------------------------------------------------------------

KEYS = ["linear_relu_replaced", "linear_gelu_replaced", "conv_bn_relu_replaced", "layernorm_relu_replaced",
        "attention_replaced", "norm_replaced", "pointwise_clusters", "total_replaced", "kernels_before",
        "kernels_after", "peak_memory_before", "peak_memory_after", "speedup_achieved"]


@pytest.fixture(scope="module")
def measured():
    converter = convert.ModelConverter()
    model = Picklable(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].bias = nn.Parameter(torch.zeros(8))
    return converter, model, converter.convert_model(model, (16, 8))


def test_statistics(measured):
    converter, _, _ = measured
    stats = converter.conversion_stats
    assert list(stats) == KEYS
    assert stats["total_replaced"] == sum(record_of(measured[2]).counts.values())
    assert stats["kernels_before"] is stats["kernels_after"] is None
    assert stats["peak_memory_before"] == 2 * 16 * 8 * 4, "of the relu: its input and its result"
    assert stats["speedup_achieved"] > 0


def test_statistics_that_were_not_measured_are_none():
    converter = convert.ModelConverter(validate_accuracy=False, measure=False)
    fast = converter.convert_model(nn.Linear(8, 8))
    assert set(converter.conversion_stats.values()) == {None}
    fast(X)
    assert converter.conversion_stats["total_replaced"] == 0
    assert converter.conversion_stats["speedup_achieved"] is None


@pytest.mark.gpu
def test_statistics_of_a_gpu():
    converter = convert.ModelConverter()
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.GELU()).cuda()
    fast = converter.convert_model(model, (32, 64))
    stats = converter.conversion_stats
    assert 0 < stats["kernels_after"] <= stats["kernels_before"] + 2  # a replay copies input and result
    assert stats["peak_memory_before"] > 0
    assert stats["peak_memory_after"] > 0
    assert stats["speedup_achieved"] > 0
    assert fast(torch.randn(32, 64, device="cuda")).is_cuda


def test_report(measured, tmp_path):
    converter, _, _ = measured
    text = " ".join(str(converter.report()).split())
    stats = converter.conversion_stats
    assert text.startswith("Picklable, float32, CPU")
    assert f"{stats['speedup_achieved']:.2f} times as fast as before with (float32 [16, 8])." in text
    assert "Validation: accepted: error" in text
    assert f"{stats['total_replaced']} replacement" in text

    converter.report().to_json(tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["stats"] == stats
    assert found["validation"]["accepted"] is True
    assert found["versions"]["torch"] == torch.__version__

    converter.report().to_html(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<h1>Picklable" in page
    assert "$" not in page.replace("${", "")
    assert f"{stats['speedup_achieved']:.2f} times as fast" in page
    assert "Written by fusionrt.convert." in page


def test_a_report_in_json_has_no_infinities(measured, tmp_path):
    report = measured[0].report()
    verdict = dataclasses.replace(report.record.verdict, error=math.inf)
    dataclasses.replace(report, record=dataclasses.replace(report.record, verdict=verdict)).to_json(
        tmp_path / "report.json")
    found = json.loads((tmp_path / "report.json").read_text(), parse_constant=pytest.fail)
    assert found["validation"]["error"] == "inf"


def test_validate_optimization(net):
    class Half(Net):
        def forward(self, x):
            return super().forward(x[: len(x) // 2]).repeat(2, 1)

    other = Half().eval()
    other.load_state_dict(net.state_dict())
    assert frt.validate_optimization(net, net, X)[0] == 0.0
    difference, speedup = frt.validate_optimization(net, other, (X,))
    assert difference == pytest.approx((net(X) - other(X)).abs().max().item())
    assert speedup > 0
    with pytest.raises(ValidationError, match=r"output has shape torch.Size\(\[16, 4\]\) instead of"):
        frt.validate_optimization(net, nn.Linear(8, 4), X)


def test_save_and_load(measured, tmp_path):
    import safetensors.torch
    _, model, fast = measured
    weights, facts = convert.save_converted(fast, tmp_path / "some.model")
    assert (weights.name, facts.name) == ("some.model.safetensors", "some.model.json")
    content = json.loads(facts.read_text())
    assert list(content["stats"]) == KEYS
    assert content["benchmark"]["us_after"] > 0

    fresh = Picklable(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    safetensors.torch.load_model(fresh, str(weights))  # the class itself, without us
    assert_same(dict(fresh.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    other = Picklable(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2))
    loaded = convert.load_converted(other, tmp_path / "some.model.json")
    assert_same(loaded(X), model(X))
    assert loaded.forward.options._replace(on_graph=None) == fast.forward.options._replace(on_graph=None)

    other.load_state_dict(fast.state_dict())
    fast.load_state_dict(other.state_dict())
    facts.write_text('{"format": 1}')
    with pytest.raises(ValueError, match=r"some.model.json was not written by save_converted: 'passes'"):
        convert.load_converted(other, weights)


def test_a_full_disk_leaves_the_weights_before(measured, tmp_path, monkeypatch):
    import safetensors.torch

    def full(model, filename, metadata):
        Path(filename).write_text("half of it")
        raise OSError(28, "No space left on device")

    (tmp_path / "net.safetensors").write_text("the earlier one")
    monkeypatch.setattr(safetensors.torch, "save_model", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / 'net.safetensors'}'"):
        convert.save_converted(measured[2], tmp_path / "net")
    assert [path.read_text() for path in tmp_path.iterdir()] == ["the earlier one"]


def test_tied_weights_and_what_was_undone_are_saved(net, with_passes, tmp_path):
    names = with_passes(wrong=replaced_by(torch.sigmoid))
    fast = frt.auto_convert_model(net, example_inputs=X, passes=names)
    convert.save_converted(fast, tmp_path / "net")
    loaded = convert.load_converted(Net().eval(), tmp_path / "net")
    assert loaded.forward.options.excluded == {"wrong:relu", "wrong:relu_1"}
    assert loaded.second.weight is loaded.first.weight
    assert_same(loaded(X), net(X))


def test_safetensors_is_named_when_it_is_absent(measured, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match=r"save_converted: safetensors is not installed: pip install"):
        convert.save_converted(measured[2], tmp_path / "x")
    with pytest.raises(ImportError, match=r"load_converted: safetensors is not installed: pip install"):
        convert.load_converted(nn.Linear(2, 2), tmp_path / "x")


@pytest.mark.parametrize("trace", [
    lambda fast, x: torch.export.export(fast, (x,), strict=False).module(),
    lambda fast, x: torch.export.export(fast, (x,), strict=True).module(),
    lambda fast, x: torch.jit.trace(fast, x), lambda fast, x: make_fx(lambda x: fast(x))(x),
    lambda fast, x: torch.fx.symbolic_trace(nn.Sequential(fast))],
    ids=["export", "strict export", "jit", "make_fx", "fx"])
def test_others_trace_the_uncompiled_forward(trace):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), torch.randn(2, 8)
    fast = frt.auto_convert_model(model, example_inputs=x)
    torch.testing.assert_close(trace(fast, x)(2 * x), model(2 * x))


def test_export_of_a_partial_forward():
    model, x = nn.Linear(8, 8).eval(), torch.randn(2, 8)
    model.forward = functools.partial(nn.Linear.forward, model)
    fast = frt.auto_convert_model(model, example_inputs=x)
    torch.testing.assert_close(torch.export.export(fast, (x,)).module()(x), model(x))
