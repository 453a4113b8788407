"""The programs of examples/ run, and do what they say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_language_model_learns():
    command = [sys.executable, ROOT / "examples" / "transformer.py", "--steps", "41", "--characters", "8"]
    alone = os.environ | {"OMP_NUM_THREADS": "1"}  # more wait for each other where other tests run
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=alone)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", done.stdout)]
    assert len(losses) == 3 and losses[0] > 4 and losses[-1] < 3.3
    assert len(done.stdout.split(" s\n")[-1].rstrip("\n")) <= 8
