"""The rules of fusionrt.optim against torch.optim's, or their formulas in float64; how states are kept."""

import itertools

import pytest
import torch

from fusionrt.optim import SGD, Adam, AdamW, Lion, clip_grad_norm_, ema_update_, quantised
from fusionrt.optim.table import CAPACITY

SHAPES = ((300, 40), (7,), (4097,), (), (0, 3))
RULES = [
    (AdamW, {}), (AdamW, {"amsgrad": True, "weight_decay": 0.1}), (AdamW, {"maximize": True, "lr": 1e-2}),
    (Adam, {"weight_decay": 0.1}), (Adam, {"amsgrad": True, "maximize": True, "weight_decay": 0.01}),
    (Adam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "betas": (0.5, 0.9), "eps": 1e-3}),
    (SGD, {"lr": 1e-2}), (SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    (SGD, {"momentum": 0.9, "dampening": 0.5, "maximize": True}),
    (SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
]


def parameters(device, dtype=torch.float32, shapes=SHAPES):
    return [torch.nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]


def copies(params, dtype=None):
    return [torch.nn.Parameter(p.detach().to(dtype or p.dtype).clone()) for p in params]


def give_gradients(step, *lists):
    """The same to each list; of a new size every step, and sometimes none."""
    for index, same in enumerate(zip(*lists, strict=True)):
        grad = torch.randn(same[0].shape, device=same[0].device) * (1 + step % 3)
        for param in same:
            param.grad = None if (step + index) % 5 == 0 else grad.to(param.dtype).clone()


def apart(ours, theirs):
    """The largest difference, relative to the largest value."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(ours, theirs, strict=True)]
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs if a.numel())


def side_by_side(rule, options, ours, steps):
    """Our optimizer and torch's after the same steps on copies of the same parameters, and these."""
    theirs = copies(ours)
    optimizer, reference = rule(ours, **options), getattr(torch.optim, rule.__name__)(theirs, **options)
    for step in range(steps):
        give_gradients(step, ours, theirs)
        optimizer.step()
        reference.step()
    return optimizer, reference, theirs


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_a_hundred_steps_equal_torchs(rule, options, device):
    ours = parameters(device)
    optimizer, reference, theirs = side_by_side(rule, options, ours, 100)
    assert apart(ours, theirs) <= 1e-6
    for name in next(iter(reference.state.values()), {}):
        pairs = [(optimizer.state[a][name].cpu(), reference.state[b][name].cpu())
                 for a, b in zip(ours, theirs, strict=True) if a.numel()]
        assert apart(*zip(*pairs, strict=True)) <= 1e-6, name


@pytest.mark.parametrize(("rule", "options"), RULES)
def test_float64(rule, options, device):
    ours = parameters(device, torch.float64)
    _, _, theirs = side_by_side(rule, options, ours, 20)
    assert apart(ours, theirs) <= 1e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rule", [AdamW, SGD])
def test_16_bit_parameters_are_no_further_from_the_truth_than_torchs(rule, dtype, device):
    options = {"lr": 1e-2} | ({"momentum": 0.9} if rule is SGD else {"eps": 1e-4})
    ours = parameters(device, dtype)
    theirs, exact = copies(ours), copies(ours, torch.float64)
    torchs = getattr(torch.optim, rule.__name__)
    made = [rule(ours, **options), torchs(theirs, **options), torchs(exact, **options)]
    for step in range(20):
        give_gradients(step, ours, theirs, exact)
        for param, other in zip(exact, ours, strict=True):
            param.grad = None if other.grad is None else other.grad.double()  # rounded as theirs
        for optimizer in made:
            optimizer.step()
    assert apart(ours, exact) <= 2 * apart(theirs, exact)


def test_lion(device):
    lr, beta1, beta2, decay = 1e-2, 0.9, 0.99, 0.1
    ours = parameters(device, shapes=((65, 33), (5,)))
    exact = [p.detach().double() for p in ours]
    averages = [torch.zeros_like(p) for p in exact]
    optimizer = Lion(ours, lr, (beta1, beta2), decay)
    for step in range(30):
        give_gradients(step, ours)
        optimizer.step()
        for p, x, m in zip(ours, exact, averages, strict=True):
            if p.grad is not None:
                g = p.grad.double()
                x.mul_(1 - lr * decay).sub_(lr * torch.sign(beta1 * m + (1 - beta1) * g))
                m.mul_(beta2).add_((1 - beta2) * g)
    assert apart(ours, exact) <= 1e-6


@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 0.9), (0.3, 0.99)])
@pytest.mark.parametrize("rule", [Adam, AdamW])
def test_moments_of_small_betas_do_not_cancel(rule, betas, device):
    """As torch's: a large gradient that is nearly forgotten takes no digits from the small ones after it."""
    ours = [torch.nn.Parameter(torch.zeros(3, device=device))]
    theirs = copies(ours)
    optimizer = rule(ours, lr=0.1, betas=betas)
    reference = getattr(torch.optim, rule.__name__)(theirs, lr=0.1, betas=betas)
    for size in (1e4, 1e-3, 1e-8):
        for param in (*ours, *theirs):
            param.grad = torch.tensor([1.0, -2.0, 3.0], device=device) * size
        optimizer.step()
        reference.step()
        torch.testing.assert_close(optimizer.state[ours[0]]["exp_avg"], reference.state[theirs[0]]["exp_avg"],
                                   rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=0)


def test_lions_moment_of_a_small_beta_does_not_cancel(device):
    param = torch.nn.Parameter(torch.zeros(1, device=device))
    optimizer = Lion([param], lr=0.1, betas=(0.9, 0.0))
    for size in (1.0, 1e-9):
        param.grad = torch.full((1,), size, device=device)
        optimizer.step()
    assert optimizer.state[param]["exp_avg"].item() == pytest.approx(1e-9, rel=1e-6)


def test_lion_stays_where_its_direction_is_zero(device):
    param = torch.nn.Parameter(torch.ones(5, device=device))
    param.grad = torch.tensor([0.0, 1.0, -1.0, 0.0, float("nan")], device=device)
    Lion([param], lr=0.25).step()
    torch.testing.assert_close(param.detach().cpu(), torch.tensor([1.0, 0.75, 1.25, 1.0, float("nan")]),
                               equal_nan=True)


# -- more tensors than a launch holds, memory of all kinds -----------------------------------------

def test_more_tensors_than_a_launch_holds(device):
    ours = parameters(device, shapes=[(k % 5 + 1,) for k in range(2 * CAPACITY + 3)])
    theirs = copies(ours)
    optimizer, reference = AdamW(ours, 1e-2, clip_grad_norm=0.5), torch.optim.AdamW(theirs, 1e-2)
    for step in range(3):
        give_gradients(step, ours, theirs)
        torch.nn.utils.clip_grad_norm_(theirs, 0.5)
        optimizer.step()
        reference.step()
    # Of all together: single elements cross 0.
    assert apart([torch.cat(ours)], [torch.cat(theirs)]) <= 1e-6


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"clip_grad_norm": 1.0}], ids=str)
def test_gradients_at_any_address(options, device):
    """DistributedDataParallel's are views of a bucket, aligned to an element alone."""
    ours = parameters(device, shapes=((97, 101), (5003,)))
    same = copies(ours)
    optimizer, aligned = AdamW(ours, **options), AdamW(same, **options)
    for _ in range(3):
        for a, b in zip(ours, same, strict=True):
            bucket = torch.randn(a.numel() + 1, device=device)
            a.grad, b.grad = bucket[1:].view_as(a), bucket[1:].clone().view_as(b)
        optimizer.step()
        aligned.step()
    assert all(torch.equal(a, b) for a, b in zip(ours, same, strict=True))


def test_parameters_at_any_address(device):
    flat = torch.randn(5001, device=device)
    ours, theirs = torch.nn.Parameter(flat.clone()[1:]), torch.nn.Parameter(flat.clone()[1:].clone())
    optimizer, reference = Adam([ours], 1e-2), torch.optim.Adam([theirs], 1e-2)
    for step in range(3):
        give_gradients(step + 1, [ours], [theirs])
        optimizer.step()
        reference.step()
    assert apart([ours], [theirs]) <= 1e-6


def test_gradients_of_another_layout(device):
    images = torch.randn(4, 3, 8, 8, device=device).contiguous(memory_format=torch.channels_last)
    ours, theirs = torch.nn.Parameter(images.clone()), torch.nn.Parameter(images.clone())
    optimizer, reference = Adam([ours], 1e-2), torch.optim.Adam([theirs], 1e-2)
    for grad in (torch.randn(4, 3, 8, 8), torch.randn_like(images, device="cpu"),
                 torch.randn(1, 3, 1, 8).expand(4, 3, 8, 8)):
        ours.grad, theirs.grad = grad.to(device), grad.to(device)
        optimizer.step()
        reference.step()
    assert apart([ours], [theirs]) <= 1e-6
    assert optimizer.state[ours]["exp_avg"].stride() == ours.stride()


@pytest.mark.parametrize("options", [{}, {"state_dtype": "8bit"}, {"state_dtype": torch.bfloat16}], ids=str)
def test_the_same_bits_every_time(options, device):
    start, found = parameters(device, shapes=((123, 457), (3,))), []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        torch.manual_seed(3)
        params = copies(start)
        optimizer = AdamW(params, 1e-2, clip_grad_norm=1.0, **options)
        for step in range(4):
            give_gradients(step, params)
            optimizer.step()
        found.append(params)
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# -- how states are kept ---------------------------------------------------------------------------

def train(optimizer_of, device, steps=40):
    """First and last loss of a small regression."""
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(32, 256), torch.nn.GELU(), torch.nn.Linear(256, 32))
    model.to(device)
    x, target = torch.randn(64, 32, device=device), torch.randn(64, 32, device=device)
    optimizer = optimizer_of(model.parameters())
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses[0], losses[-1]


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_small_states_train_as_well(state_dtype, device):
    first, exact = train(lambda p: torch.optim.AdamW(p, 3e-3), device)
    _, small = train(lambda p: AdamW(p, 3e-3, state_dtype=state_dtype), device)
    assert exact < 0.5 * first
    assert first - small > 0.98 * (first - exact)


def test_8_bit_states_take_30_percent_of_float32(device):
    param = torch.nn.Parameter(torch.randn(512, 512, device=device))
    param.grad = torch.randn_like(param)
    sizes = []
    for state_dtype in (None, "8bit"):
        optimizer = AdamW([param], state_dtype=state_dtype)
        optimizer.step()
        sizes.append(sum(v.nbytes for v in optimizer.state[param].values()))
    assert sizes[1] <= 0.30 * sizes[0]


@pytest.mark.parametrize("signed", [True, False])
def test_8_bit_codes(signed):
    value = torch.randn(3, 1000) * 10.0 ** torch.randn(3, 1000)
    value = value if signed else value.square()
    value[0, :300] = 0
    codes, scale = quantised.encode(value, signed)
    decoded = quantised.decode(codes, scale, signed)
    blocks = scale.repeat_interleave(quantised.BLOCK)[:value.numel()].view_as(value)
    large = value.abs() >= blocks * 2.0**-15
    assert ((decoded - value).abs()[large] <= 0.045 * value.abs()[large]).all()  # half a level: 2^(1/16) - 1
    assert (decoded[0, :300] == 0).all()
    assert signed or (decoded[value > 0] > 0).all()
    again, same = quantised.encode(decoded, signed)
    assert torch.equal(again, codes) and torch.equal(same, scale)


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_small_changes_of_the_second_moment_are_kept_on_average(state_dtype, device):
    """A step changes it by a thousandth, less than the distance of two values of these types."""
    param = torch.nn.Parameter(torch.zeros(1 << 14, device=device))
    optimizer = AdamW([param], lr=0.0, state_dtype=state_dtype)
    for step in range(300):
        param.grad = torch.ones_like(param)
        param.grad.view(-1, 256)[:, 0] = 4.0  # so that a block's largest is not what all others are
        if step >= 100:
            param.grad.view(-1, 256)[:, 1:] *= 0.1
        optimizer.step()
    found = optimizer.state_dict()["state"][0]["exp_avg_sq"].float().view(-1, 256)[:, 1:]
    exact = (1 - 0.999**100) * 0.999**200 + 0.01 * (1 - 0.999**200)
    assert found.mean().item() == pytest.approx(exact, rel=0.02)


def test_master_weights_keep_what_bfloat16_would_lose(device):
    ours = parameters(device, torch.bfloat16, [(64, 65)])
    exact = copies(ours, torch.float32)
    optimizer, reference = AdamW(ours, 1e-4, master_weights=True), torch.optim.AdamW(exact, 1e-4)
    for _ in range(100):
        ours[0].grad = torch.randn_like(ours[0])
        exact[0].grad = ours[0].grad.float()
        optimizer.step()
        reference.step()
    assert apart([optimizer.state[ours[0]]["master_weight"]], exact) <= 1e-6
    assert torch.equal(ours[0], optimizer.state[ours[0]]["master_weight"].bfloat16())


@pytest.mark.parametrize("rule", [AdamW, SGD])
def test_master_weights_follow_what_is_written_into_a_parameter(rule, device):
    module = torch.nn.Linear(64, 65, bias=False, device=device, dtype=torch.bfloat16)
    weight = module.weight
    optimizer = rule(module.parameters(), 1e-3, master_weights=True)
    for _ in range(3):
        weight.grad = torch.randn_like(weight)
        optimizer.step()
    master = optimizer.state[weight]["master_weight"]
    before = master.clone()
    module.load_state_dict({"weight": torch.ones_like(weight)})
    weight.grad = None
    optimizer.step()  # of no parameter: the next one has to know still
    weight.grad = torch.zeros_like(weight)
    optimizer.param_groups[0].update(lr=0.0)
    optimizer.step()
    assert torch.equal(weight, torch.ones_like(weight))
    master.copy_(before)
    with torch.no_grad():
        weight.copy_(before)
        weight[0] = 2
    optimizer.step()  # the other rows keep what bfloat16 has no bits for
    assert torch.equal(master[1:], before[1:])
    assert master[0].eq(2).all()
    weight.data = torch.full_like(weight, 3)
    optimizer.step()
    assert optimizer.state[weight]["master_weight"].eq(3).all()


def test_cpu_and_gpu_round_alike_by_chance():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for state_dtype, dtype in itertools.product([torch.bfloat16, "8bit"], [torch.float32, torch.bfloat16]):
        on_cpu = parameters("cpu", dtype, [(97, 101)])
        on_gpu = [torch.nn.Parameter(p.detach().cuda()) for p in on_cpu]
        made = [AdamW(params, 1e-2, state_dtype=state_dtype) for params in (on_cpu, on_gpu)]
        for _ in range(5):
            on_cpu[0].grad = torch.randn_like(on_cpu[0])
            on_gpu[0].grad = on_cpu[0].grad.cuda()
            for optimizer in made:
                optimizer.step()
        moments = [o.state[p[0]]["exp_avg_sq"].cpu() for o, p in zip(made, (on_cpu, on_gpu), strict=True)]
        # The last bit of a logarithm or a division may differ.
        assert (moments[0] == moments[1]).float().mean() > 0.99


# --- what autograd and memory must be told

@pytest.mark.parametrize("make", [AdamW, Adam, Lion, lambda p: SGD(p, lr=0.1)])
def test_autograd_knows_of_a_step(make):
    p = torch.nn.Parameter(torch.randn(5))
    loss, p.grad, before = (p * p).sum(), torch.ones(5), p._version
    make([p]).step()
    assert p._version == before + 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_autograd_knows_of_averages_and_clipped_gradients():
    average, value = torch.zeros(3), torch.nn.Parameter(torch.ones(3))
    value.grad = torch.full((3,), 10.0)
    ema_update_([average], [value], 0.9)
    clip_grad_norm_([value], 1.0)
    assert (average._version, value.grad._version) == (1, 1)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_other_shapes_are_refused(device):
    """Kernels know addresses alone."""
    small, large = (torch.nn.Parameter(torch.ones(n, device=device)) for n in (8, 4000))
    first, second = AdamW([small]), AdamW([large])
    small.grad, large.grad = torch.ones_like(small), torch.ones_like(large)
    first.step()
    second.load_state_dict(first.state_dict())
    with pytest.raises(RuntimeError, match=r"of shape \(4000,\) has a state exp_avg of shape \(8,\)"):
        second.step()
    small.data, small.grad = torch.ones(4000, device=device), torch.ones(4000, device=device)
    with pytest.raises(RuntimeError, match=r"of shape \(4000,\) has a state exp_avg of shape \(8,\)"):
        first.step()
    third = SGD([large], lr=0.1)
    third.step()
    large.grad.data = torch.ones(8, device=device)
    with pytest.raises(RuntimeError, match=r"of shape \(4000,\) has a gradient or a state of shape \(8,\)"):
        third.step()


def test_pairs_of_averages():
    with pytest.raises(ValueError, match="ema_update_: averages and values must be as many, got 1 and 0"):
        ema_update_([torch.ones(1)], [], 0.9)
    kept = [torch.tensor([0]), torch.zeros(2, 3).t(), torch.zeros(2)]
    with pytest.raises(ValueError, match="pair 2 must agree"):
        ema_update_(kept, [torch.tensor([7]), torch.ones(3, 2), torch.ones(3)], 0.5)
    assert not any(t.any() for t in kept)  # nothing is written


@pytest.mark.parametrize("make", [SGD, lambda p, lr: SGD(p, lr, momentum=0.5), Adam])
def test_without_decay_an_infinite_parameter_stays(device, make):
    p = torch.nn.Parameter(torch.tensor([-float("inf"), 1.0], device=device))
    optimizer = make([p], lr=0.1)
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    assert p[0] == -float("inf") and p[1] < 1


@pytest.mark.parametrize("state", [None, "8bit"])
def test_parameters_that_lie_otherwise_in_the_same_memory(device, state):
    """`.data` turned in place, or in another layout: states and gradients follow."""
    start = torch.randn(32, 32, device=device)
    grads = torch.randn(4, 32, 32, device=device)
    found = []
    for make in (lambda p: torch.optim.SGD(p, 0.1, 0.5), lambda p: SGD(p, 0.1, 0.5, state_dtype=state)):
        p = torch.nn.Parameter(start.clone())
        optimizer = make([p])
        for k, g in enumerate(grads):
            if k == 2:
                p.data = p.data.t()
            p.grad = g.clone()
            optimizer.step()
        found.append(p.detach().clone())
    limit = 1e-6 if state is None else 2e-2
    assert (found[0] - found[1]).abs().max() < limit * found[0].abs().max()


def test_parameters_that_shrink_in_the_same_memory(device):
    memory = torch.zeros(100, device=device)
    p = torch.nn.Parameter(memory)
    optimizer = SGD([p], lr=1.0)
    p.grad = torch.ones(100, device=device)
    optimizer.step()
    p.data = p.data[:50]
    p.grad = torch.full((50,), 2.0, device=device)
    optimizer.step()
    assert torch.equal(memory, torch.tensor([-3.0, -1.0], device=device).repeat_interleave(50))


def test_a_parameter_that_is_given_twice():
    made = []
    for kind in (torch.optim.SGD, SGD):
        p = torch.nn.Parameter(torch.ones(3))
        with pytest.warns(UserWarning, match="duplicate"):
            optimizer = kind([p, p], lr=0.1)
        for _ in range(2):
            p.grad = torch.ones(3)
            optimizer.step()
        made.append(p.detach())
    torch.testing.assert_close(*made)
