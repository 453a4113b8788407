"""The primitives that expressions are made of: of each its text, what it is, what it costs.

The text is valid in C++ and in Python alike: `where`, `exp`, ... are defined by `kernels_src/mathematics.cuh`
on one side and by `fusionrt/cpu/math32.py` on the other. Its derivative is `derivatives.RULES`'.
"""

from typing import NamedTuple

CASTS = ("float16", "bfloat16", "float32", "int8", "uint8", "int16", "int32", "int64", "bool")
# What a primitive has to do with rows: a value over all elements of one, a place in it, their number.
REDUCTION, COLUMN, SIZE = "reduction", "column", "size"


class Primitive(NamedTuple):
    text: str                      # of operands' names; of a leaf but "const" its own
    is_truth: bool = False
    truths: tuple[int, ...] = ()   # operands that have to be truth values
    is_leaf: bool = False
    of_row: str | None = None      # REDUCTION, COLUMN or SIZE
    uniform: bool | None = None    # whether a row has one value of it; None: if its operands have
    instructions: int = 1          # of a GPU, measured: some of those with 1 take two
    is_costly: bool = False        # on a CPU, beside a load and a store
    is_shortened: bool = False     # 16-bit results need less of its mathematics


PRIMITIVES = {
    "arg": Primitive("{}", is_leaf=True, instructions=0),
    "random": Primitive("{}", is_leaf=True, uniform=False),
    "mask": Primitive("{}", is_truth=True, is_leaf=True, uniform=False),
    "const": Primitive("acc_t({})", is_leaf=True, uniform=True, instructions=0),
    "row_size": Primitive("{}", is_leaf=True, of_row=SIZE, uniform=True),

    "add": Primitive("{} + {}"),
    "sub": Primitive("{} - {}"),
    "mul": Primitive("{} * {}"),
    "mul_rn": Primitive("mul_rn({}, {})"),  # never contracted to an FMA
    "div": Primitive("div({}, {})", instructions=15),
    "reciprocal": Primitive("reciprocal({})", instructions=4, is_shortened=True),
    # 1 / a for 2^-126 < |a| < 2^126: what is out of range need not be looked after.
    "near_reciprocal": Primitive("near_reciprocal({})", instructions=2, is_shortened=True),
    "neg": Primitive("-{}"),
    "abs": Primitive("abs_({})"),

    "lt": Primitive("{} < {}", is_truth=True),
    "le": Primitive("{} <= {}", is_truth=True),
    "eq": Primitive("{} == {}", is_truth=True),
    "ne": Primitive("{} != {}", is_truth=True),
    "flag": Primitive("{} != {}", is_truth=True),  # of an argument that has to be bool, and 0
    "and": Primitive("{} & {}", is_truth=True, truths=(0, 1)),
    "or": Primitive("{} | {}", is_truth=True, truths=(0, 1)),
    "not": Primitive("logical_not({})", is_truth=True, truths=(0,)),
    "kept": Primitive("kept({}, {})", is_truth=True),
    "number": Primitive("acc_t({})", truths=(0,)),
    "where": Primitive("where({}, {}, {})", truths=(0,)),

    # A primitive, so that its derivative can be had from the output: 0 at 0, and NaN passes.
    "relu": Primitive("where({0} <= acc_t(0), acc_t(0), {0})"),
    # With dropout after it: what is dropped is 0 too, so the derivative needs no mask. The last is a number.
    "relu_dropped": Primitive("where({1}, where({0} <= acc_t(0), acc_t(0), {0}) * {2}, acc_t(0))",
                              truths=(1,)),
    # Between two numbers. NaN passes and has a gradient of 0; so have the ends, which `clamp` lets pass.
    "hardtanh": Primitive("where({0} <= {1}, {1}, where({0} >= {2}, {2}, {0}))", instructions=4),
    # A primitive, so that at 0 its slope is alpha and the slope of that is 0, as torch's.
    "elu": Primitive("where({0} > acc_t(0), {0}, {1} * expm1(where({0} > acc_t(0), acc_t(0), {0})))",
                     instructions=16, is_costly=True),
    "minimum": Primitive("minimum({}, {})"),
    "maximum": Primitive("maximum({}, {})"),
    "clamp": Primitive("minimum(maximum({}, {}), {})"),

    "exp": Primitive("exp({})", instructions=5, is_costly=True, is_shortened=True),
    "exp2": Primitive("exp2({})", instructions=8, is_costly=True),
    "expm1": Primitive("expm1({})", instructions=12, is_costly=True, is_shortened=True),
    "log": Primitive("log({})", instructions=26, is_costly=True),
    "log1p": Primitive("log1p({})", instructions=29, is_costly=True),
    "log2": Primitive("log2({})", instructions=26, is_costly=True),
    "sqrt": Primitive("sqrt({})", instructions=15),
    # Of norms and deviations: its derivative follows from the result, where the square may leave the range,
    # and is 0 at 0, as torch's.
    "norm_sqrt": Primitive("sqrt({})"),
    "rsqrt": Primitive("rsqrt({})", instructions=5),
    "pow": Primitive("pow_({}, {})", instructions=86, is_costly=True),
    "sin": Primitive("sin({})", instructions=90, is_costly=True),
    "cos": Primitive("cos({})", instructions=90, is_costly=True),
    "tanh": Primitive("tanh({})", instructions=10, is_costly=True, is_shortened=True),
    "erf": Primitive("erf({})", instructions=21, is_costly=True),
    "sigmoid": Primitive("sigmoid({})", instructions=9, is_costly=True, is_shortened=True),
    # 1 - sigmoid(a), given both; a function of a alone.
    "sigmoid_complement": Primitive("sigmoid_complement({}, {})", is_costly=True, is_shortened=True),
    "softplus": Primitive("softplus({})", instructions=15, is_costly=True, is_shortened=True),
    # Of the first alone; the others are parts of it, of which the slope needs two as well.
    "tanh_softplus": Primitive("{2} * {1}", is_costly=True),
    "normcdf": Primitive("normcdf({})", instructions=12, is_costly=True, is_shortened=True),
    "normpdf": Primitive("normpdf({})", instructions=6, is_costly=True, is_shortened=True),

    "floor": Primitive("floor({})"),
    "round": Primitive("rint({})"),
    "round_near": Primitive("rint_near({})"),  # round, for |a| < 2^21
    "trunc": Primitive("trunc({})"),
    **{f"cast_{t}": Primitive(f"cast_{t}({{}})") for t in CASTS},

    # Rows: a value over all elements of a row.
    "row_sum": Primitive("row_sum({})", of_row=REDUCTION, uniform=True),
    "row_max": Primitive("row_max({})", of_row=REDUCTION, uniform=True),
    # A maximum on which the result does not depend: that of a softmax, whose derivative cancels.
    "row_top": Primitive("row_max({})", of_row=REDUCTION, uniform=True),
    "row_first": Primitive("row_first({})", of_row=REDUCTION, uniform=True),  # where the first maximum stands
    # Mean, and the sum of the squares of the distances from it, which a kernel finds together.
    "moment_mean": Primitive("moment_mean({})", of_row=REDUCTION, uniform=True),
    "moment_squares": Primitive("moment_squares({}, {})", of_row=REDUCTION, uniform=True),
    "total": Primitive("total({})", uniform=True),  # of one value a row, over all rows
    # The value of an argument in the column that is given, 0 outside of the row.
    "taken": Primitive("taken({}, {})", of_row=COLUMN, uniform=True),
    "is_column": Primitive("is_column({})", is_truth=True, of_row=COLUMN, uniform=False),
    # This column <= the given one.
    "up_to_column": Primitive("up_to_column({})", is_truth=True, of_row=COLUMN, uniform=False),
    # Of x alone: mean and rstd are its (x - mean)'s and their derivatives are in the first operand's.
    # Differences first, so that those of equal gradients are 0; what is uniform is multiplied by itself.
    "standardized": Primitive("({} - {}) * {}"),
    "rms_scaled": Primitive("{} * {}"),
    # For a softmax, whose gradient is 0 where its result is: not to read the mask again.
    "masked": Primitive("where({1}, {0}, {2})", truths=(1,)),
    # exp(x - max) / sum, and its logarithm x - max - log(sum): of x alone as well.
    "softmaxed": Primitive("softmaxed({}, {}, {})", is_shortened=True),
    "log_softmaxed": Primitive("({} - {}) - {}"),
}
