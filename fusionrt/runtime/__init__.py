"""From a problem to kernels on a GPU: text, machine code, launches.

One file an idea. Text: `source` (constants, headers, template), `geometry`, `access`, `vectors` and
`pointwise` (elements), `abreast`, `accumulators`, `parts`, `reduction_cut`, `resident` and `planes`
(reductions over any dimensions), `rows` with `row_operands`, `row_registers`, `row_staged`, `carried`,
`row_layout` and `row_choice` (expressions over rows); `instructions` (what they cost), `matrix_units`,
`tensor_map`. Machine code: `compiler`, `binding`, `cache`, `lock`, `archive`. Launches: `device`, `launch`
(of a problem) with `pointwise_launch` and `row_launch`, `kernel` (of a template of its own),
`partial_sums`, `arrivals`, `scratch`; `plan` (what a call does), `plan_text` (that as Python), `native`
and `llvm` (as machine code).
"""
