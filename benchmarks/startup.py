"""How long `embedx --help` takes beside importing hydra, and importing embedx beside numpy.

Run: python benchmarks/startup.py
Prints medians over interleaved runs of whole processes and their ratio.
"""

import statistics
import subprocess
import sys
import time

RUNS = 11
PAIRS = [
    {
        "embedx --help": [sys.executable, "-m", "embedx", "--help"],
        "import hydra": [sys.executable, "-c", "import hydra"],
    },
    {
        "import embedx": [sys.executable, "-c", "import embedx"],
        "import numpy": [sys.executable, "-c", "import numpy"],
    },
]


def compare(commands: dict[str, list[str]]) -> None:
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for round_ in range(RUNS + 1):
        for name, command in commands.items():
            started = time.perf_counter()
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if round_:  # the first warms the disk
                seconds[name].append(time.perf_counter() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"{name:15} {median * 1000:6.0f} ms")
    pairs = [a / b for a, b in zip(*seconds.values(), strict=True)]
    print(f"ratio           {statistics.median(pairs):6.2f}  (median of {RUNS} pairs)")


def main() -> None:
    for commands in PAIRS:
        compare(commands)


if __name__ == "__main__":
    main()
