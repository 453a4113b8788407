"""What fusionrt.optim refuses: options, groups, parameters and gradients, each by name."""

import pytest
import torch
from test_optim import parameters

import fusionrt.optim as optim
from fusionrt.optim import SGD, Adam, AdamW, Lion


@pytest.mark.parametrize(("option", "value", "text"), [
    ("lr", None, "Adam: lr must be a number, got None"),
    ("lr", "0.1", "Adam: lr must be a number, got '0.1'"),
    ("lr", torch.ones(2), "Adam: lr must be a number or a tensor of one element"),
    ("eps", "a", "Adam: eps must be a number, got 'a'"), ("betas", None, "Adam: betas must be two numbers"),
    ("betas", (1.5, 0.9), r"Adam: betas\[0\] must be in \[0, 1\), got 1.5"),
    ("clip_grad_norm", -1.0, "Adam: clip_grad_norm must be positive, got -1.0")])
def test_what_is_put_into_a_group_later(option, value, text):
    """Nothing is written, in other groups neither."""
    params = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizer = Adam([{"params": [param]} for param in params])
    for param in params:
        param.grad = torch.ones(3)
    optimizer.step()
    before = [param.detach().clone() for param in params]
    kept, optimizer.param_groups[1][option] = optimizer.param_groups[1][option], value
    with pytest.raises((TypeError, ValueError), match=text):
        optimizer.step()
    assert all(map(torch.equal, params, before))
    optimizer.param_groups[1][option] = kept
    optimizer.step()
    assert not any(map(torch.equal, params, before))


def test_errors():
    param = torch.nn.Parameter(torch.zeros(3, 4))
    for error, text, call in [
        (ValueError, "AdamW: lr must not be negative, got -1.0", lambda: AdamW([param], -1.0)),
        (ValueError, r"SGD: lr must be a number or a tensor of one element, got shape \(2,\)",
         lambda: SGD([param], torch.ones(2))),
        (ValueError, "Lion: weight_decay must not be negative, got -0.1",
         lambda: Lion([param], weight_decay=-0.1)),
        (ValueError, "SGD: momentum must not be negative", lambda: SGD([param], momentum=-1)),
        (ValueError, "SGD: nesterov needs a momentum and no dampening, got momentum=0, dampening=0",
         lambda: SGD([param], nesterov=True)),
        (ValueError, "AdamW: differentiable=True is not supported",
         lambda: AdamW([param], differentiable=True)),
        (RuntimeError, "`fused` and `foreach` cannot be `True` together",
         lambda: AdamW([param], fused=True, foreach=True)),
        (ValueError, "AdamW: state_dtype must be None, torch.float32, torch.bfloat16 or '8bit', got '4bit'",
         lambda: AdamW([param], state_dtype="4bit")),
        (ValueError, "AdamW: clip_grad_norm must be positive, got 0",
         lambda: AdamW([param], clip_grad_norm=0)),
        (ValueError, "AdamW: state_dtype must be None",
         lambda: AdamW([{"params": [param], "state_dtype": 8}])),
        (TypeError, r"ema_update_: decay must be a number, got a Tensor of shape \(2,\)",
         lambda: optim.ema_update_([], [], torch.ones(2))),
        (TypeError, "get_ema_multi_avg_fn: decay must be a number, got 'x'",
         lambda: optim.get_ema_multi_avg_fn("x")),
        (ValueError, "ema_update_: decay must be in", lambda: optim.ema_update_([], [], 2.0)),
        (TypeError, r"ema_update_: values\[0\] must be a tensor, got list",
         lambda: optim.ema_update_([torch.zeros(1)], [[1.0]], 0.5)),
        (TypeError, "ema_update_: pair 0 has an average of torch.float32 and a value of torch.complex64",
         lambda: optim.ema_update_([torch.zeros(1)], [torch.zeros(1, dtype=torch.complex64)], 0.5)),
        (ValueError, r"pair 0 must agree, got an average of shape \(3,\) on cpu and a value of shape \(4,\)",
         lambda: optim.ema_update_([torch.zeros(3)], [torch.zeros(4)], 0.5)),
    ]:
        with pytest.raises(error, match=text):
            call()


@pytest.mark.parametrize("rule, option, error, text", [
    (AdamW, {"lr": "1e-3"}, TypeError, "AdamW: lr must be a number, got '1e-3'"),
    (Lion, {"lr": None}, TypeError, "Lion: lr must be a number, got None"),
    (SGD, {"weight_decay": [0.1]}, TypeError, r"SGD: weight_decay must be a number, got \[0.1\]"),
    (SGD, {"weight_decay": torch.ones(2)}, ValueError, "SGD: weight_decay must be a number or a CPU tensor "
                                                       r"of one element, got shape \(2,\) on cpu"),
    (Adam, {"eps": -1}, ValueError, "Adam: eps must not be negative, got -1"),
    (AdamW, {"eps": None}, TypeError, "AdamW: eps must be a number, got None"),
    (AdamW, {"betas": (0.9, 1.0)}, ValueError, r"AdamW: betas\[1\] must be in \[0, 1\), got 1.0"),
    (AdamW, {"betas": 0.9}, TypeError, "AdamW: betas must be two numbers, got 0.9"),
    (Lion, {"betas": (0.9, 0.9, 0.9)}, TypeError, r"Lion: betas must be two numbers, got \(0.9, 0.9, 0.9\)"),
    (Lion, {"betas": "ab"}, TypeError, r"Lion: betas\[0\] must be a number, got 'a'"),
    (SGD, {"momentum": "0.9"}, TypeError, "SGD: momentum must be a number, got '0.9'"),
    (SGD, {"dampening": None}, TypeError, "SGD: dampening must be a number, got None"),
    (SGD, {"clip_grad_norm": "1"}, TypeError, "SGD: clip_grad_norm must be a number, got '1'"),
], ids=str)
def test_options_of_an_optimizer_and_of_a_group_are_refused_alike(rule, option, error, text):
    first, second = parameters("cpu", shapes=((3,), (4,)))
    with pytest.raises(error, match=text):
        rule([first], **option)
    optimizer = rule([first])
    with pytest.raises(error, match=text):
        optimizer.add_param_group({"params": [second], **option})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group([second])


def stepped(param, grad, name=None, **options):
    param.grad = grad
    AdamW([(name, param)] if name else [param], **options).step()


def test_parameters_that_are_refused():
    complex_ = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(TypeError, match="AdamW: parameter 0 of group 0 is complex64, expected float16, "):
        stepped(complex_, torch.zeros_like(complex_))
    wide = torch.nn.Parameter(torch.zeros(4, 4)[:, ::2])
    with pytest.raises(ValueError, match=r"of shape \(4, 2\) has strides \(4, 2\), expected a tensor that"):
        stepped(wide, torch.zeros(4, 2))
    double = torch.nn.Parameter(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="AdamW: state_dtype=8bit is for parameters of at most 32 bits"):
        stepped(double, torch.zeros_like(double), state_dtype="8bit")


def test_sparse_gradients_are_refused():
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 2])).sum().backward()
    expected = (r"AdamW: the gradient of parameter 0 of group 0 is sparse \(torch.sparse_coo\), expected a "
                "dense one; make it so with sparse=False of its embedding")
    with pytest.raises(RuntimeError, match=expected):
        AdamW(embedding.parameters()).step()


@pytest.mark.parametrize("call, text", [
    (lambda model: optim.clip_grad_norm_(model, 1.0),
     "clip_grad_norm_: parameters must be tensors, got a Linear"),
    (lambda model: optim.clip_grad_norm_(model.named_parameters(), 1.0),
     r"clip_grad_norm_: parameters\[0\] must be a tensor, got tuple"),
    (lambda model: optim.ema_update_(model, model, 0.9),
     "ema_update_: averages must be tensors, got a Linear"),
    (lambda model: optim.ema_update_(model.parameters(), model.state_dict(), 0.9),
     r"ema_update_: values\[0\] must be a tensor, got str")])
def test_what_holds_tensors_is_none(call, text):
    with pytest.raises(TypeError, match=f"^{text}$"):
        call(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("max_norm", [-1.0, -1])
@pytest.mark.parametrize("norm_type", [2.0, 1.0])
def test_a_negative_norm_to_clip_to(max_norm, norm_type):
    """torch turns the gradients round."""
    param = torch.nn.Parameter(torch.ones(3))
    param.grad = torch.full((3,), 2.0)
    with pytest.raises(ValueError, match=r"^clip_grad_norm_: max_norm must not be negative, got -1\.0$"):
        optim.clip_grad_norm_([param], max_norm, norm_type)
    assert param.grad.eq(2).all()
    assert float(optim.clip_grad_norm_([param], 0.0, norm_type)) > 0 and param.grad.eq(0).all()
