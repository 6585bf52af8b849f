"""The examples as real processes, and the README's lines as theirs."""

import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def test_a_module_of_ones_own_learns_where_to_learn():
    example = REPOSITORY / "examples" / "own_module.py"
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after, without = map(float, re.findall(r"error ([\d.]+)", done.stdout))
    # A constant zero has an error of 4: half the mean square of heights from 0.1 to 5.
    assert 0.5 < before < 4.5
    assert after < 0.1
    assert without > 1  # it is the inner steps that draw the wave
    sparsity = float(re.search(r"never change: ([\d.]+)%", done.stdout)[1])
    assert 20 < sparsity < 80
    # The README quotes this run.
    readme = (REPOSITORY / "README.md").read_text()
    quoted = re.search(r"falls from ([\d.]+)\nbefore meta-training to ([\d.]+) after it \(([\d.]+) without", readme)
    shares = re.search(r"and (\d+) % of the weights never change", readme)
    for printed, stated in zip((before, after, without, sparsity), (*quoted.groups(), shares[1]), strict=True):
        assert abs(printed - float(stated)) <= max(0.1 * printed, 0.02)  # other processors round differently


def test_the_readme_shows_lines_of_the_example():
    readme = (REPOSITORY / "README.md").read_text()
    section = readme.partition("## Use it in your own code\n")[2]
    snippet = re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]
    shown = [line.strip() for line in snippet.splitlines() if line.strip()]
    example = {line.strip() for line in (REPOSITORY / "examples" / "own_module.py").read_text().splitlines()}
    assert len(shown) > 15
    assert [line for line in shown if line not in example] == []
