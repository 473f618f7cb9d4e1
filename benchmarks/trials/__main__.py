"""What trials by the clock decide in bad cases, and what they cost.

    python -m benchmarks.trials [--real] [--json FILE]

Emulated: `benchmarks/trials/emulated.py` says what is. With --real a GPT trains on two processes, a core each, with
rounds of trials ten times as often (`benchmarks/trials/real.py`): keep the cores free. Either takes at most a quarter
of an hour. Cost: how much longer the steps that ran otherwise than decided took, of the whole job.

Exit code 1 if a balancer is on or off at the end of a job where it should not be.
"""

import sys
from typing import Any

from benchmarks.command import parser, write_rows
from benchmarks.trials import emulated, real
from benchmarks.trials.cases import CASES


def main() -> None:
    options_of = parser("trials", __doc__)
    options_of.add_argument("--real", action="store_true", help="train on two cores")
    options = options_of.parse_args()
    print(
        f"{'case':<42} {'steps':>5} {'step, ms':>8}  {'on at the end':<34} {'cost':>6}  gains by the clock", flush=True
    )
    rows: list[dict[str, Any]] = []

    def show(row: dict[str, Any]) -> None:
        rows.append(row)
        of = row["on"].items()
        on = ", ".join(f"{name} {'on' if on else 'off since ' + str(row['off_since'][name])}" for name, on in of)
        gains = ", ".join(f"{name} {gain}" for name, gain in row["gains"].items())
        about = f"{row['case']:<42} {row['steps']:>5} {row['step_ms']:>8.1f}"
        print(f"{about}  {on:<34} {row['cost']:>6.2%}  {gains}", flush=True)

    (real if options.real else emulated).run_cases(show)
    write_rows(options.json, rows)
    expected = {case.what: case.expected for case in CASES}
    wrong = [row["case"] for row in rows if row["on"] != expected[row["case"]]]
    if wrong:
        sys.exit(f"decided otherwise than it should be, or not at all: {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
