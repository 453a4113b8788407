"""What is computed once for the weights' present numbers, masks prepared once, windows in one copy."""

import gc

import pytest
import torch
from convert_checks import (
    called,
    check,
    check_module,
    compiled,
    compiled_apart,
    graph_of,
    leaf,
    of_pass,
    randomised,
)
from convert_net import one_thread  # noqa: F401  (a fixture)
from test_convert_passes import Decoder
from torch import nn
from torch.nn import functional as F
from torch.testing import assert_close

import fusionrt as frt
from fusionrt.convert import derived
from fusionrt.convert.kept_masks import attention_by_kept_mask
from fusionrt.ops.attention import attention

# -- what follows from weights ---------------------------------------------------------------------------


class Biased(nn.Module):
    """Positions' biases from a table by a buffer's index, as Swin has them; a scale from parameters, and one
    from statistics."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Parameter(torch.randn(9, 4)), nn.BatchNorm1d(5)
        self.register_buffer("index", torch.randint(9, (25,)))

    def forward(self, x):
        bias = self.table[self.index].view(5, 5, 4).permute(2, 0, 1).contiguous().unsqueeze(0)
        scale = self.norm.weight.exp() * (self.norm.running_var + self.norm.eps).rsqrt()
        shift = self.norm.bias - self.norm.running_mean * scale
        return (x + bias).softmax(-1) * scale.view(1, 1, 1, 5) + shift.view(1, 1, 1, 5)


def kept_calls(function, *args):
    return called(function, *args).count("from_weights")


def test_what_follows_from_weights(device):
    model, x = randomised(Biased()).to(device), torch.randn(2, 4, 5, 5, device=device)
    with torch.no_grad():
        check(model, x, calls=3)
        assert kept_calls(model, x) == 2
        assert "permute" not in called(model, x)


def test_weights_that_are_written_to(device):
    """In place, by loading others, by other memory; buffers as well."""
    model, x = randomised(Biased()).to(device), torch.randn(2, 4, 5, 5, device=device)
    run, _ = compiled(model)
    other = randomised(Biased()).to(device)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.table.mul_(2), lambda: model.norm.running_var.add_(1),
                       lambda: model.norm.train()(torch.randn(9, 5, device=device)),  # no version tells that
                       lambda: model.norm.eval(), lambda: model.index.fill_(3),
                       lambda: model.load_state_dict(other.state_dict()),
                       lambda: setattr(model.table, "data", model.table.data * 3)):
            change()
            for _ in range(2):
                assert_close(run(x), model(x))


def test_statistics_that_a_norm_moves(device):
    """Folded into convolutions, on a CPU ahead; torch counts no version of them."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).to(device).eval()
    x = torch.randn(2, 3, 6, 6, device=device)
    run, _ = compiled(model)
    with torch.no_grad():
        for _ in range(3):
            assert_close(run(x), model(x), rtol=1e-3, atol=1e-3)
            model.train()(x * 3 + 1)
            model.eval()


def test_models_of_one_graph_keep_their_own(device):
    models = [randomised(Biased()).to(device) for _ in range(3)]
    x = torch.randn(2, 4, 5, 5, device=device)
    torch._dynamo.reset()
    runs = [compiled_apart(m) for m in models]
    with torch.no_grad():
        for _ in range(2):
            for run, model in zip(runs, models, strict=True):
                assert_close(run(x), model(x))


def test_tables_that_a_graph_writes_to(device):
    """What its replays write no version tells."""
    class Queue(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("places", torch.arange(6))
            self.table = nn.Parameter(torch.randn(12, 4))

        def forward(self, x):
            if self.training:
                self.places.add_(1)
                return x * 2
            return x + self.table[self.places].exp()

    model, x = Queue().to(device), torch.randn(6, 4, device=device)
    run, _ = compiled(model)
    with torch.no_grad():
        for training in (False, False, False, True, True, True, True, False, True, False, False):
            model.train(training)
            before = model.places.clone()
            found = run(x)
            after = model.places.clone()
            model.places.copy_(before)
            assert_close(found, model(x))
            assert torch.equal(after, model.places)


def test_tied_weights(device):
    """One parameter by two names, of which one is written to."""
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.randn(4, 4))
            self.b = self.a

        def forward(self, x):
            return x @ (self.a.exp() + self.b.sin())

    model, x = Tied().to(device), torch.randn(3, 4, device=device)
    run, _ = compiled(model)
    with torch.no_grad():
        assert_close(run(x), model(x))
        model.b.add_(1)
        assert_close(run(x), model(x))


def test_inference_tensors_and_modes(device):
    model, x = Biased().to(device), torch.randn(2, 4, 5, 5, device=device)
    with torch.inference_mode():
        made = randomised(Biased()).to(device)
        run, _ = compiled(made)
        for _ in range(2):
            assert_close(run(x), made(x))
            made.table.mul_(2)  # which no version tells
    run, _ = compiled(model)
    for mode in (torch.inference_mode, torch.no_grad, torch.inference_mode):
        with mode():
            assert_close(run(x), model(x))
            model.table.mul_(2)


def test_what_is_not_kept(device):
    w, x = nn.Parameter(torch.randn(4, 4, device=device)), torch.randn(3, 4, device=device)
    assert kept_calls(lambda x: x @ w.t()[:, :2], x) == 0          # a view
    assert kept_calls(lambda x: (w.exp(), x @ w), x) == 0          # a result of the graph
    assert kept_calls(lambda x: x * torch.rand_like(w)[:3], x) == 0
    assert kept_calls(lambda x: x @ F.dropout(w.exp(), 0.5), x) == 1  # w.exp() alone
    assert kept_calls(lambda x: x @ torch.native_dropout(w, 0.5, True)[0], x) == 0
    assert kept_calls(lambda x: x @ torch.ops.aten.native_dropout(w, 0.5, True)[0], x) == 0
    assert kept_calls(lambda x: x @ torch.binomial(w.detach().abs(), w.detach().sigmoid()), x) == 2
    latents = w.view(1, 1, 4, 4)
    assert kept_calls(lambda x: x @ F.scaled_dot_product_attention(latents, latents, latents, dropout_p=0.5),
                      x) == 0
    buffer = nn.BatchNorm1d(4).to(device).running_mean

    def counted(x):
        total = x + buffer.exp()
        buffer.add_(1)
        return total

    assert kept_calls(counted, x) == 0                             # is written to


def test_dropout_of_weights_alone():
    """Attention among latents, as it is in training, outside of which gradients are recorded."""
    class Latents(nn.Module):
        def __init__(self):
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 6, 8))
            self.attention = nn.MultiheadAttention(8, 2, 0.5)

        def forward(self, x):
            return x @ self.attention(self.latents, self.latents, self.latents)[0].transpose(1, 2)

    run, _ = compiled(Latents())
    x = torch.randn(1, 5, 8)
    with torch.no_grad():
        run(x)
        assert not torch.equal(run(x), run(x))


def test_a_result_of_the_graph_is_the_callers(device):
    """What is kept is not handed out."""
    w = nn.Parameter(torch.randn(4, 4, device=device))
    run, _ = compiled(lambda x: (w.exp() * 2 + x, w.exp().clone(), (w * 3).t()))
    with torch.no_grad():
        for _ in range(2):
            found = run(torch.zeros(4, 4, device=device))
            assert_close(found, (w.exp() * 2, w.exp(), (w * 3).t()))
            for t in found:
                t.zero_()


def test_training_computes_from_weights_each_time(device):
    model = randomised(Biased()).to(device)
    check_module(model, leaf(2, 4, 5, 5, device=device), rtol=1e-4, atol=1e-5)
    assert "from_weights" not in called(model, torch.randn(2, 4, 5, 5, device=device), grad=True)


def test_several_views_of_one_value_share_it():
    w, x = nn.Parameter(torch.randn(6, 4)), torch.randn(3, 4)

    def function(x):
        first, second = w.exp().chunk(2)
        return x * first + second

    with torch.no_grad():
        check(function, x)
        assert kept_calls(function, x) == 1


def test_what_is_kept_goes_with_its_graph():
    w, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4)
    run, _ = compiled(lambda x: x @ w.exp())
    with torch.no_grad():
        run(x)
    assert len(derived.kept[w]) == 1
    del run
    torch._dynamo.reset()
    gc.collect()
    assert len(derived.kept[w]) == 0


def test_tables_of_a_rotary_embedding(device):
    """The pass that looks at how they are made comes first."""
    model, x = Decoder().to(device), torch.randn(2, 6, 16, device=device)
    frequencies = model.frequencies
    del model.frequencies
    model.frequencies = nn.Parameter(frequencies)
    with torch.no_grad():
        counts = check(model, x, calls=2, rtol=1e-4, atol=1e-5)
    assert counts["rotary"] == counts["attention"] == 1
    assert kept_calls(model, x) == 2


def test_stacked_weights_are_kept_once(monkeypatch):
    for place in of_pass("stacked", DEVICES=("cpu",)):
        monkeypatch.setattr(*place)
    a, b, x = nn.Linear(4, 3), nn.Linear(4, 5), torch.randn(2, 4)

    def function(x):
        return a(x).exp().sum() + b(x).exp().sum()

    with torch.no_grad():
        check(function, x)
        calls = called(function, x)
    assert calls.count("stacked") == 2 and "from_weights" not in calls


# -- masks ---------------------------------------------------------------------------------------------------


class Windows(nn.Module):
    """Swin's attention in windows, some of them shifted: biases from a table, a mask from sizes."""

    def __init__(self, heads=2, width=16, windows=4, length=9):
        super().__init__()
        self.heads, self.windows = heads, windows
        self.qkv, self.table = nn.Linear(width, 3 * width), nn.Parameter(torch.randn(25, heads))
        self.register_buffer("index", torch.randint(25, (length * length,)))

    def forward(self, x):
        count, length, width = x.shape
        split = self.qkv(x).reshape(count, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = split[0], split[1], split[2]
        bias = self.table[self.index].view(length, length, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        scores = (q * (width // self.heads) ** -0.5).matmul(k.transpose(-2, -1)) + bias
        parts = x.new_zeros((self.windows, length))
        parts[1:, 3:] = 1
        parts[2:, 6:] = 2
        mask = parts.unsqueeze(1) - parts.unsqueeze(2)
        mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
        scores = scores.view(count // self.windows, self.windows, self.heads, length, length)
        scores = scores + mask.unsqueeze(1).unsqueeze(0)
        weights = F.softmax(scores.view(-1, self.heads, length, length), dim=-1)
        return weights.matmul(v).transpose(1, 2).reshape(count, length, width)


@pytest.mark.parametrize("images", [1, 3])
def test_masks_of_shifted_windows(images, device):
    model, x = Windows().to(device), torch.randn(4 * images, 9, 16, device=device)
    run, _ = compiled(model)
    with torch.no_grad():
        assert check(model, x, calls=2, rtol=1e-4, atol=1e-5)["attention"] == 1
        assert {"from_weights", "attention_by_kept_mask"} < set(called(model, x))
        for change in (lambda: None, lambda: model.table.mul_(3), lambda: model.qkv.weight.neg_()):
            change()
            assert_close(run(x), model(x), rtol=1e-4, atol=1e-5)
    counts = check_module(model, x.requires_grad_(), rtol=1e-4, atol=1e-5)
    assert counts["softmax"] == 1  # the table has a gradient


def test_a_mask_of_zeros_is_none(device):
    q, k, v = (torch.randn(2, 2, 5, 16, device=device) for _ in range(3))

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.zeros(1, 1, 5, 5, device=q.device))

    with torch.no_grad():
        check(function, q, k, v, rtol=1e-4, atol=1e-5)
    call, _ = (n for n in graph_of(function, q, k, v).graph.nodes if n.op == "call_function")
    assert "mask" not in call.kwargs and len(call.args) == 3


def test_biases_of_t5(device):
    """Buckets that are counted in place; a bias that each layer arranges for itself, once with a mask."""
    table = nn.Parameter(torch.randn(8, 4, device=device))

    def bias(x):
        length = x.shape[2]
        places = torch.arange(length, device=x.device)
        distance = places[None, :] - places[:, None]
        buckets = 0
        buckets += (distance > 0).to(torch.long) * 4
        buckets += torch.where(distance.abs() < 3, distance.abs(), 3)
        return F.embedding(buckets, table).permute(2, 0, 1).unsqueeze(0)

    def function(x):
        found, causal = bias(x), torch.ones(6, 6, dtype=torch.bool, device=x.device).tril()
        for mask in (found, found, torch.where(causal, found, -3e38)):
            scores = torch.matmul(x, x.transpose(2, 3)) + mask.contiguous()
            x = torch.matmul(scores.softmax(-1), x)
        return x

    x = torch.randn(2, 4, 6, 8, device=device)
    with torch.no_grad():
        assert check(function, x, calls=2, rtol=1e-4, atol=1e-5) == {"attention": 3}
    calls = called(function, x)
    assert calls == ["from_weights", "attention_by_kept_mask", "attention_by_kept_mask", "from_weights",
                     "attention_by_kept_mask", "with_strides"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_kept_masks(mode, dtype):
    """Numbers, booleans, queries without any key; masks that are written to; as in the op that keeps none."""
    shape = (2, 4, 49, 32)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    empty = torch.ones(1, 1, 49, 49, dtype=torch.bool, device="cuda").tril()
    empty[..., 5, :] = False
    for mask in (torch.randn(1, 4, 49, 49, device="cuda", dtype=dtype), empty, ~empty,
                 torch.zeros(2, 1, 1, 49, device="cuda", dtype=dtype)):
        with mode():
            for change in (torch.Tensor.clone, torch.Tensor.neg_, torch.Tensor.zero_):
                (torch.Tensor.logical_not_ if change is torch.Tensor.neg_ and mask.dtype == torch.bool
                 else change)(mask)
                for _ in range(2):
                    expected = attention(q, k, v, mask=mask, scale=0.3)
                    assert_close(attention_by_kept_mask(q, k, v, mask, 0.3), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_kept_masks_in_replays(dtype):
    model, x = Windows(width=64).cuda().to(dtype), torch.randn(8, 9, 64, device="cuda", dtype=dtype)
    run, _ = compiled(model)
    with torch.no_grad():
        for change in (lambda: None, lambda: model.table.mul_(3), lambda: model.index.fill_(2),
                       lambda: model.qkv.weight.neg_()):
            change()
            for _ in range(4):
                assert_close(run(x), model(x), rtol=1e-2, atol=1e-2)


# -- windows ---------------------------------------------------------------------------------------------


def windowed(x, shift=3, window=4):
    """Rolled, in windows, and back."""
    b, h, w, c = x.shape
    x = torch.roll(x.exp(), shifts=(-shift, -shift), dims=(1, 2))
    x = x.view(b, h // window, window, w // window, window, c).permute(0, 1, 3, 2, 4, 5)
    x = x.reshape(-1, window * window, c)
    x = x - x.amax(1, keepdim=True)
    x = x.view(b, h // window, w // window, window, window, c).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, c)
    return torch.roll(x, shifts=(shift, shift), dims=(1, 2))[:, :h, :w, :].contiguous() + 1


@pytest.mark.parametrize("shape", [(1, 8, 8, 6), (3, 8, 12, 5)])
def test_rows_that_are_moved(monkeypatch, shape, device):
    for place in of_pass("moved_rows", DEVICES=("cpu", "cuda")):
        monkeypatch.setattr(*place)
    x = torch.randn(shape, device=device)
    with torch.no_grad():
        check(windowed, x, calls=2)
        calls = called(windowed, x)
        assert calls.count("index_select") == 2
        assert "roll" not in calls and "permute" not in calls
        run, _ = compiled(windowed)
        for size in (8, 16, 24):  # sizes that vary
            more = torch.randn(2, size, size, 4, device=device)
            assert_close(run(more), windowed(more))


def test_rolls_that_stay(monkeypatch):
    for place in of_pass("moved_rows", DEVICES=("cpu",)):
        monkeypatch.setattr(*place)

    def torn(x):
        return torch.roll(x.exp(), 1, 2).transpose(1, 2).contiguous() * 2

    def seen(x):
        rolled = torch.roll(x.exp(), 1, 0)
        return rolled * 2, rolled.transpose(0, 1).contiguous() * 3

    def alone(x):
        return torch.roll(x.exp(), 1, 0) * 2

    x = torch.randn(4, 5, 6)
    with torch.no_grad():
        for function in (torn, seen, alone):
            check(function, x)
            assert "roll" in called(function, x)
    check(windowed, leaf(1, 8, 8, 2))
    assert "roll" in called(windowed, leaf(1, 8, 8, 2), grad=True)


def normed(width):
    """A convolution with a norm that is folded into it."""
    convolution = nn.Conv2d(width, width, 3, bias=False)
    return randomised(nn.Sequential(convolution, nn.BatchNorm2d(width), nn.ReLU())).eval()


def test_weights_that_are_assigned_until_an_address_comes_back():
    model = normed(16)
    fast, x = frt.auto_convert_model(model, validate_accuracy=False), torch.randn(2, 16, 8, 8)
    with torch.no_grad():
        for times in (1, 2, 3, 4, 2, 6):
            fast(x)
            for _ in range(times):
                for p in fast.parameters():
                    p.data = p.data * 0.9
            assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_weights_that_are_assigned_with_other_strides():
    model = normed(4)
    fast, x = frt.auto_convert_model(model, validate_accuracy=False), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        fast(x)
        fast[0].weight.data = fast[0].weight.data.transpose(2, 3)
        assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)


def test_weights_that_another_process_writes_to():
    """Hogwild: its writes change no version here."""
    model = normed(4)
    model.share_memory()
    fast, x = frt.auto_convert_model(model, validate_accuracy=False), torch.randn(2, 4, 8, 8)
    with torch.no_grad():
        fast(x)
        version = model[0].weight._version
        for p in model.parameters():
            p.data.mul_(0.5)
        assert model[0].weight._version == version
        assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
