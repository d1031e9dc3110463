"""How long the demo takes, from the command to the map, in a folder of its own.

Run: python benchmarks/demo.py
Prints the median over three whole processes.
"""

import statistics
import subprocess
import sys
import tempfile
import time

RUNS = 3


def main() -> None:
    seconds = []
    for _ in range(RUNS):
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            command = [sys.executable, "-m", "embedx", "run"]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            seconds.append(time.perf_counter() - started)
    print(f"demo {statistics.median(seconds):.1f} s (median of {RUNS}, at most {max(seconds):.1f})")


if __name__ == "__main__":
    main()
