"""fusionrt.optim as a drop-in for torch.optim: groups, hooks, GradScaler, graphs."""

import subprocess
import sys

import pytest
import torch
from checking import needs_nvrtc
from test_optim import apart, copies, give_gradients, parameters

import fusionrt.optim as optim
from fusionrt.cpu.kernel import Kernel as CPUKernel
from fusionrt.optim import SGD, AdamW
from fusionrt.optim.precompile import USUAL, gpu_kernels, sources
from fusionrt.runtime import compiler

SHAPES = ((70, 80), (9,))


def steps(n, *pairs):
    """n steps of (optimizer, parameters) on the same gradients."""
    for _ in range(n):
        give_gradients(1, *(params for _, params in pairs))
        for optimizer, _ in pairs:
            optimizer.step()


# -- groups, parameters that come and go -----------------------------------------------------------

def test_groups_with_options_of_their_own(device):
    ours = parameters(device, shapes=((30, 7), (12,), (5, 5)))
    theirs = copies(ours)

    def groups(params):
        return [{"params": params[:1], "weight_decay": 0.2},
                {"params": params[1:2], "lr": 0.1, "amsgrad": True}]

    optimizer, reference = AdamW(groups(ours), 1e-2), torch.optim.AdamW(groups(theirs), 1e-2)
    steps(2, (optimizer, ours), (reference, theirs))
    for o, params in ((optimizer, ours), (reference, theirs)):
        o.add_param_group({"params": params[2:], "betas": (0.5, 0.6)})
    steps(3, (optimizer, ours), (reference, theirs))
    assert apart(ours, theirs) <= 1e-6


def test_a_group_may_do_without_the_momentum_of_nesterov(device):
    ours = parameters(device, shapes=((30, 7), (12,)))
    theirs = copies(ours)
    made = [o([{"params": params[:1]}, {"params": params[1:], "momentum": 0}], 0.1, 0.9, nesterov=True)
            for o, params in ((SGD, ours), (torch.optim.SGD, theirs))]
    steps(3, (made[0], ours), (made[1], theirs))
    assert apart(ours, theirs) <= 1e-6


def test_parameters_states_and_gradients_may_be_replaced(device):
    ours = parameters(device, shapes=((30, 7), (12,)))
    theirs = copies(ours)
    optimizer, reference = AdamW(ours, 1e-2), torch.optim.AdamW(theirs, 1e-2)
    steps(2, (optimizer, ours), (reference, theirs))
    for o, params in ((optimizer, ours), (reference, theirs)):
        params[0].data = params[0].data * 2  # other memory, the same parameter
        o.state[params[1]]["exp_avg"] = torch.ones_like(params[1])
    steps(2, (optimizer, ours), (reference, theirs))
    for o in (optimizer, reference):
        o.state.clear()
    steps(2, (optimizer, ours), (reference, theirs))
    fresh = torch.randn(12, device=device)
    for o, params in ((optimizer, ours), (reference, theirs)):
        del o.state[params[1]]
        params[1] = o.param_groups[0]["params"][1] = torch.nn.Parameter(fresh.clone())
    steps(2, (optimizer, ours), (reference, theirs))
    assert apart(ours, theirs) <= 1e-6


def test_only_parameters_with_a_gradient_are_updated_and_get_a_state(device):
    ours = parameters(device, shapes=((30, 7), (12,)))
    start = ours[1].detach().clone()
    optimizer = AdamW(ours, weight_decay=0.5)
    optimizer.step()
    assert not optimizer.state
    ours[0].grad = torch.ones_like(ours[0])
    optimizer.step()
    assert list(optimizer.state) == ours[:1] and torch.equal(ours[1], start)
    optimizer.zero_grad()
    assert ours[0].grad is None
    before = ours[0].detach().clone()
    optimizer.step()
    assert torch.equal(ours[0], before) and optimizer.state[ours[0]]["step"].item() == 1


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 1.0}])
@pytest.mark.parametrize("shapes", [((0, 7), (12,)), ((0,),)])
def test_steps_of_empty_parameters_count(shapes, options, device):
    ours = parameters(device, shapes=shapes)
    optimizer = AdamW(ours, **options)
    steps(3, (optimizer, ours))
    assert [optimizer.state[param]["step"].item() for param in ours] == [3] * len(ours)


def test_parameters_without_a_gradient_may_be_of_any_kind(device):
    frozen = torch.nn.Parameter(torch.zeros(5, dtype=torch.uint8, device=device), requires_grad=False)
    ours = parameters(device, shapes=SHAPES)
    give_gradients(1, ours)
    before = ours[0].detach().clone()
    optimizer = SGD([frozen, *ours], 0.5)
    optimizer.step()
    torch.testing.assert_close(ours[0].detach(), before - 0.5 * ours[0].grad)
    optimizer.param_groups[0] = optimizer.param_groups[0] | {"lr": 0.25}
    optimizer.step()
    torch.testing.assert_close(ours[0].detach(), before - 0.75 * ours[0].grad)


@pytest.mark.gpu
def test_parameters_on_a_cpu_and_a_gpu():
    shapes = ((30, 7), (5000,))
    ours = [*parameters("cpu", shapes=shapes), *parameters("cuda", shapes=shapes)]
    theirs = copies(ours)
    optimizer, reference = AdamW(ours, 1e-2, clip_grad_norm=1.0), torch.optim.AdamW(theirs, 1e-2)
    for _ in range(3):
        give_gradients(1, ours, theirs)
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        reference.step()
    assert apart(ours, theirs) <= 1e-6


# -- what stands around a step ---------------------------------------------------------------------

def test_closures_hooks_and_schedulers(device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    called, made = [], []
    for rule, params in ((AdamW, ours), (torch.optim.AdamW, theirs)):
        optimizer = rule(params, 1e-2)
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        made.append((optimizer, params, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)))

    def closure_of(optimizer, params):
        def closure():
            optimizer.zero_grad()
            loss = sum(p.square().sum() for p in params)
            loss.backward()
            return loss
        return closure

    for _ in range(4):
        losses = [optimizer.step(closure_of(optimizer, params)).item() for optimizer, params, _ in made]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        for *_, scheduler in made:
            scheduler.step()
    assert called[:4] == ["before", "after"] * 2
    assert apart(ours, theirs) <= 1e-6


@pytest.mark.parametrize("on", ["cpu", "its device"])
def test_a_learning_rate_that_is_a_tensor(on, device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    lr = torch.tensor(1e-2, device="cpu" if on == "cpu" else device)
    optimizer, reference = AdamW(ours, lr), torch.optim.AdamW(theirs, 1e-2)
    steps(2, (optimizer, ours), (reference, theirs))
    lr.mul_(0.1)
    reference.param_groups[0]["lr"] = 1e-3
    steps(2, (optimizer, ours), (reference, theirs))
    assert apart(ours, theirs) <= 1e-6


@pytest.mark.parametrize("unscales", [False, True])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}], ids=str)
def test_grad_scaler(unscales, options, device):
    """The second of four steps has an infinite gradient: nothing moves, nothing is counted."""
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    made = [(AdamW(ours, 1e-2, **options), ours), (torch.optim.AdamW(theirs, 1e-2), theirs)]
    scalers = [torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=3) for _ in made]
    for step in range(4):
        give_gradients(1, ours, theirs)
        for (optimizer, params), scaler in zip(made, scalers, strict=True):
            for p in params:
                p.grad = scaler.scale(p.grad)
            if step == 1:
                params[0].grad[3, 3] = float("inf")
            before = [p.detach().clone() for p in params]
            if unscales or optimizer is made[1][0]:
                scaler.unscale_(optimizer)
            if options and optimizer is made[1][0]:
                torch.nn.utils.clip_grad_norm_(params, 0.5)
            scaler.step(optimizer)
            scaler.update()
            assert step != 1 or all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert scalers[0].get_scale() == scalers[1].get_scale() == 512.0
    assert made[0][0].state[ours[0]]["step"].item() == 3
    assert apart(ours, theirs) <= 1e-6


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_clipping_by_a_norm_that_is_not_finite_is_torchs(bad, device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    optimizer, reference = SGD(ours, 1e-2, clip_grad_norm=1.0), torch.optim.SGD(theirs, 1e-2)
    give_gradients(1, ours, theirs)
    ours[1].grad[2] = theirs[1].grad[2] = bad
    torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    optimizer.step()
    reference.step()
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, equal_nan=True)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}], ids=str)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_a_step_with_a_gradient_that_is_not_finite_is_skipped(bad, options, device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    optimizer = AdamW(ours, 1e-2, skip_nonfinite=True, **options)
    reference = torch.optim.AdamW(theirs, 1e-2)
    for step in range(4):
        give_gradients(1, ours, theirs)
        if step == 1:
            ours[0].grad[3, 3] = bad
        else:
            torch.nn.utils.clip_grad_norm_(theirs, options.get("clip_grad_norm", 1e9))
            reference.step()
        optimizer.step()
    assert optimizer.state[ours[0]]["step"].item() == 3
    assert apart(ours, theirs) <= 1e-6


def test_gradients_that_are_only_looked_at_do_not_count_for_clipping(device):
    """One group clips, another skips steps that are not finite: each option is of its groups alone."""
    ours = parameters(device, shapes=(*SHAPES, (500, 9)))
    theirs = copies(ours)
    clipped, watched, plain = ours
    optimizer = SGD([{"params": [watched], "skip_nonfinite": True}, {"params": [plain]},
                     {"params": [clipped], "clip_grad_norm": 0.5}], 1e-2)
    reference = torch.optim.SGD(theirs, 1e-2)
    for bad in (None, watched, clipped, plain):
        give_gradients(1, ours, theirs)
        if bad is not None:
            bad.grad[3] = float("inf")
        skipped = [p for p in ours if p is watched and (bad is watched or bad is clipped)]
        for p, q in zip(ours, theirs, strict=True):
            q.grad = None if any(p is s for s in skipped) else p.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs[:1], 0.5)
        optimizer.step()
        reference.step()
        for p, q in zip(ours, theirs, strict=True):
            torch.testing.assert_close(p, q, equal_nan=True)


def test_a_momentum_that_is_switched_on_later_begins_with_the_gradient(device):
    """torch's buffer is at first the gradient, undamped, whenever it is made."""
    ours = parameters(device, torch.bfloat16, SHAPES)
    theirs = copies(ours, torch.float32)
    pairs = [(SGD(ours, 1e-2, dampening=0.5, master_weights=True), ours),
             (torch.optim.SGD(theirs, 1e-2, dampening=0.5), theirs)]
    for momentum in (0.0, 0.9):
        for _ in range(3):
            give_gradients(1, ours)
            for p, q in zip(ours, theirs, strict=True):
                q.grad = p.grad.float()
            for optimizer, _ in pairs:
                optimizer.param_groups[0]["momentum"] = momentum
                optimizer.step()
    assert apart([pairs[0][0].state[p]["master_weight"] for p in ours], theirs) <= 1e-6


@pytest.mark.gpu
def test_steps_in_a_cuda_graph():
    ours = parameters("cuda", shapes=SHAPES)
    theirs = copies(ours)
    lr = torch.tensor(1e-2, device="cuda")
    optimizer = AdamW(ours, lr, clip_grad_norm=1.0, state_dtype=torch.float32)
    reference = torch.optim.AdamW(theirs, 1e-2)
    give_gradients(1, ours, theirs)

    def refer():
        for p, q in zip(ours, theirs, strict=True):
            q.grad = p.grad.clone()
        torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        refer()
        optimizer.step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            optimizer.step()
        for k in range(3):
            for p in ours:
                p.grad.copy_(torch.randn_like(p))
            lr.fill_(1e-2 * (k + 1))
            reference.param_groups[0]["lr"] = 1e-2 * (k + 1)
            refer()
            graph.replay()
    torch.cuda.synchronize()
    assert apart(ours, theirs) <= 1e-6
    assert optimizer.state[ours[0]]["step"].item() == 4


@pytest.mark.gpu
def test_the_first_step_cannot_be_captured():
    ours = parameters("cuda", shapes=SHAPES)
    optimizer = AdamW(ours)
    give_gradients(1, ours)
    with pytest.raises(RuntimeError, match="take one step with the same parameters before the capture"), \
            torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.step()


@pytest.mark.gpu
def test_a_step_does_not_wait_for_the_device():
    ours = parameters("cuda", shapes=SHAPES)
    optimizer = AdamW(ours, torch.tensor(1e-2, device="cuda"), clip_grad_norm=1.0)
    steps(2, (optimizer, ours))
    optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps(2, (optimizer, ours))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert optimizer.state[ours[0]]["step"].item() == 4


# -- clip_grad_norm_, averages ---------------------------------------------------------------------

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_norm", [0.5, 1e6])
def test_clip_grad_norm(max_norm, dtype, device):
    ours = parameters(device, dtype, ((300, 40), (7,), (4097,), (0,)))
    theirs = copies(ours, torch.float64)
    give_gradients(1, ours)
    for a, b in zip(ours, theirs, strict=True):
        b.grad = a.grad.double().clone()
    norm = optim.clip_grad_norm_(ours, max_norm)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm)
    eps = torch.finfo(dtype).eps
    assert norm.item() == pytest.approx(expected.item(), rel=1e-6)
    assert norm.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad.double(), b.grad, rtol=eps, atol=1e-7 if eps > 1e-4 else 1e-12)


def test_clip_grad_norm_of_all_kinds_at_once(device):
    ours = [*parameters(device, torch.float32, SHAPES), *parameters(device, torch.bfloat16, SHAPES)]
    theirs = copies(ours)
    for k, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if k != 1:
            a.grad = torch.randn_like(a)
            b.grad = a.grad.clone()
    ours[0].grad, theirs[0].grad = (p.grad[:1].expand_as(p) for p in (ours[0], theirs[0]))
    assert optim.clip_grad_norm_([], 1.0).item() == 0
    for norm_type in (2.0, 1.0, float("inf")):
        norm = optim.clip_grad_norm_(iter(ours[1:]), 0.3, norm_type)
        expected = torch.nn.utils.clip_grad_norm_(theirs[1:], 0.3, norm_type)
        assert norm.item() == pytest.approx(expected.item(), rel=1e-2)  # torch's is rounded to bfloat16
    ours[2].grad.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="clip_grad_norm_: the norm of the gradients is inf, so they"):
        optim.clip_grad_norm_(ours[1:], 1.0, error_if_nonfinite=True)


def test_ema_update(device):
    values = [*parameters(device), *parameters(device, torch.bfloat16)]
    averages = [torch.randn(p.shape, device=device) for p in values]
    expected = [a.double() for a in averages]
    for _ in range(3):
        optim.ema_update_(averages, values, 0.9)
        for e, v in zip(expected, values, strict=True):
            e.lerp_(v.detach().double(), 0.1)
    assert apart(averages, expected) <= 1e-6
    counter = torch.tensor(3, device=device)
    optim.ema_update_([counter], [torch.tensor(8, device=device)], 0.9)
    assert counter.item() == 8


def test_averaged_model(device):
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.BatchNorm1d(30)).to(device)
    made = [torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=f(0.9), use_buffers=True)
            for f in (optim.get_ema_multi_avg_fn, torch.optim.swa_utils.get_ema_multi_avg_fn)]
    for _ in range(3):
        for p in model.parameters():
            p.data.normal_()
        model(torch.randn(8, 20, device=device))
        for averaged in made:
            averaged.update_parameters(model)
    ours, theirs = (list(averaged.parameters()) for averaged in made)
    assert apart(ours, theirs) <= 1e-6


def test_import_of_optim_is_light():
    code = "import sys, fusionrt.optim; print([m for m in ('cupy', 'numba', 'llvmlite') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# -- kernels ---------------------------------------------------------------------------------------

def without_spills(arch, dtypes, state_dtypes):
    for kernel in gpu_kernels(dtypes, state_dtypes):
        found = compiler.build(kernel.text, kernel.stem, arch, kernel.name).metadata
        assert (found["spills"], found["stack"], found["warnings"]) == (0, 0, 0), (kernel.name, found)


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_75", "sm_90", "sm_120"])
def test_kernels_compile_without_spills(arch):
    without_spills(arch, ["float32"], [None, "8bit"])


@pytest.mark.slow
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
def test_all_kernels_compile_without_spills(arch):
    without_spills(arch, ["float32", "bfloat16", "float16", "float64"], [None, torch.bfloat16, "8bit"])


def test_a_warm_up_has_all_that_a_step_needs(monkeypatch):
    known = {source.text for source in sources("cpu", ["float32"])}
    used = []
    monkeypatch.setattr(CPUKernel, "__call__", lambda self, *_, **__: used.append(self.text))
    ours = parameters("cpu", shapes=SHAPES)
    give_gradients(1, ours)
    for rule, options in USUAL:
        rule(ours, **options, clip_grad_norm=1.0).step()
    optim.clip_grad_norm_(ours, 1.0)
    optim.ema_update_(ours, copies(ours), 0.9)
    assert len(set(used)) >= 12 and set(used) <= known


def test_torch_compile_leaves_a_step_alone(device):
    ours = parameters(device, shapes=SHAPES)
    theirs = copies(ours)
    optimizer, reference = AdamW(ours, 1e-2), torch.optim.AdamW(theirs, 1e-2)
    compiled = torch.compile(lambda: optimizer.step(), backend="eager")
    for _ in range(3):
        give_gradients(1, ours, theirs)
        compiled()
        reference.step()
    assert apart(ours, theirs) <= 1e-6
