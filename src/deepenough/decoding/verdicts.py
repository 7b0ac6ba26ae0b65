"""What a comparison of ways to generate shows, in sentences that it bears out.

A ratio of times is taken round by round and has an interval. Something is faster, or slower, only
if its whole interval is; between the two nothing is claimed. Free of torch: a report reads files.
"""

from collections.abc import Sequence

from deepenough.figure import Finding
from deepenough.measurement import Comparison, FrontierPoint, shown

#: Ways whose tokens are the model's own, and what makes them from Python.
LOSSLESS = {
    "full": "de.speculate(model, 'none')",
    "speculative": "de.speculate(model)",
    "tuned": "de.speculate(model, draft_model=...)",
}
#: Share of the tokens that early exit has to leave as they are to be considered at all.
KEPT = 0.9


def comparison_findings(found: Comparison) -> list[Finding] | None:
    """Return whether drafts pay, and whether early exit does; None for another kind of task."""
    plain = next((row for row in found.points if row.mechanism == "transformers"), None)
    if found.task.kind != "writing" or plain is None:
        return None
    rows = [row for row in found.points if row.mechanism in LOSSLESS]
    same = [row for row in rows if row.quality >= plain.quality]
    findings = []
    best = min(same, key=lambda row: row.milliseconds, default=None)
    if best is not None:
        findings.append(_lossless(best, next((r for r in same if r.mechanism == "full"), None)))
    exits = [row for row in found.points if row.mechanism == "exit"]
    if exits:
        findings.append(_early_exit(exits, best or plain))
    return findings


def _lossless(row: FrontierPoint, full: FrontierPoint | None) -> Finding:
    """Say how fast the fastest lossless way is, beside `generate` and the loop without drafts."""
    times = 1 / row.relative_time
    low, high = 1 / row.relative_time_high, 1 / row.relative_time_low
    if low <= 1:
        said = "no faster" if high >= 1 else "slower"
        return Finding(
            f"Lossless decoding does not pay here: the fastest way, {row.name}, is {said} than "
            f"generate(), {shown(times, (low, high))} times its speed."
        )
    own = "every token" if row.quality == 1 else f"{100 * row.quality:.1f} % of tokens, as there,"
    told = f"Lossless decoding gives {shown(times, (low, high))} times the speed of generate() "
    told += f"here, {own} the model's first choice: {LOSSLESS[row.mechanism]}."
    if full is not None and full is not row:
        times, low, high = row.times_as_fast(full)
        drafts = f"The drafts account for {shown(times, (low, high))} times of it."
        told += f" {drafts if low > 1 else 'Without drafts it is not significantly slower.'}"
    return Finding(told, row.command)


def _early_exit(rows: Sequence[FrontierPoint], best: FrontierPoint) -> Finding:
    """Say whether any exit that keeps enough tokens is faster than what loses none."""
    enough = [row for row in rows if row.quality >= KEPT]
    if not enough:
        careful = max(rows, key=lambda row: row.quality)
        kept = _percent(careful.quality, careful.quality_low, careful.quality_high)
        return Finding(
            f"Early exit does not pay on this model: no threshold tried keeps {100 * KEPT:g} % of "
            f"the tokens, the best is {kept}."
        )
    row = min(enough, key=lambda row: row.relative_time)
    times, low, high = row.times_as_fast(best)
    kept = _percent(row.quality, row.quality_low, row.quality_high)
    against = "generate()" if best.mechanism == "transformers" else f"{best.name} decoding"
    told = f"with {kept} of the tokens unchanged its speed is {shown(times, (low, high))} times "
    told += f"that of {against}, which changes none."
    if low > 1:
        return Finding(f"Early exit pays: {told}", row.command)
    if high < 1:
        return Finding(f"Early exit does not pay on this model: {told}")
    return Finding(f"Early exit is not significantly faster here: {told}")


def _percent(value: float, low: float, high: float) -> str:
    return f"{100 * value:.0f} % ({100 * low:.0f} to {100 * high:.0f})"
