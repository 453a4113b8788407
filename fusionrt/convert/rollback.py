"""Which pass, and which of its replacements, makes a converted model wrong; and the conversion without it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusionrt.convert.capture import Options
from fusionrt.convert.validate import ValidationError

MOST = 4  # single replacements of a pass; then it is left out

# Convert so: whether the result is accepted, why (not), and the keys of the replacements that were made.
Attempt = Callable[[Options], tuple[bool, str, Sequence[str]]]


def rolled_back(attempt: Attempt, options: Options) -> tuple[Options, dict[str, str]]:
    """Options under which the model is accepted; and what they leave out, keys of single replacements or
    names of passes, each with what was wrong. Everything together is known to fail.

    Raises ValidationError where even the captured graph, without any replacement, is not accepted.
    """
    accepted, why, _ = attempt(options._replace(passes=()))
    if not accepted:
        raise ValidationError(f"even without any replacement the captured model is not accepted: {why}")
    left_out: dict[str, str] = {}
    while True:
        first, why = _passes(attempt, options)
        name = first[-1]
        single = _replacement(attempt, options._replace(passes=first))
        if single is None or sum(key.startswith(f"{name}:") for key in left_out) == MOST:
            left_out = {key: w for key, w in left_out.items() if not key.startswith(f"{name}:")} | {name: why}
            options = options._replace(passes=tuple(p for p in options.passes if p != name))
        else:
            left_out |= [single]
            options = options._replace(excluded=options.excluded | {single[0]})
        if attempt(options)[0]:
            return options, left_out


def _passes(attempt: Attempt, options: Options) -> tuple[tuple[str, ...], str]:
    """The passes up to the guilty one, and what was wrong."""
    passes = options.passes
    n, why = _first_failing(len(passes), lambda n: attempt(options._replace(passes=passes[:n])))
    return passes[:n], why


def _replacement(attempt: Attempt, options: Options) -> tuple[str, str] | None:
    """The key of the last pass's replacement that is to blame, if one is, and what was wrong."""
    keys = [key for key in attempt(options)[2] if key.startswith(f"{options.passes[-1]}:")]

    def first(n: int) -> tuple[bool, str, Sequence[str]]:
        return attempt(options._replace(excluded=options.excluded | set(keys[n:])))

    if not keys or not first(0)[0]:
        return None
    guilty, why = _first_failing(len(keys), first)
    return keys[guilty - 1], why


def _first_failing(n: int, attempt: Callable[[int], tuple[bool, str, Sequence[str]]]) -> tuple[int, str]:
    """The least number of them that fail, and why; all n do, none does not."""
    good, bad, why = 0, n, ""
    while bad - good > 1:
        middle = (good + bad) // 2
        accepted, reason, _ = attempt(middle)
        if accepted:
            good = middle
        else:
            bad, why = middle, reason
    return bad, why or attempt(bad)[1]
