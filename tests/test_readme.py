"""The first example of README.md runs as it is printed."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_the_first_example_runs(tmp_path):
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    program = tmp_path / "example.py"
    program.write_text(f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    said = re.findall(r"# prints (.*)", code)
    assert done.stdout.split("\n")[:-1] == said, "the printed results are those of the comments"
