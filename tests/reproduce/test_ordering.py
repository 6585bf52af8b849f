"""Small versions of Tables 5 and 6 from the embedded images: sparse methods are at least level with their parents."""

import math
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from wheretolearn.reproduce.cells import load_records
from wheretolearn.runs.records import record_name
from wheretolearn.runs.results import ResultRecord

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("glyphs")]

PAIRS = {
    "table5": [
        (f"table5.sparse-la-maml.{problem}", f"table5.la-maml.{problem}", "RA")
        for problem in ("rotations", "permutations", "many")
    ],
    "table6": [
        (f"table6.{method}.{p}", f"table6.c-maml.{p}", "accuracy")
        for method in ("sparse-c-maml", "sparse-relu-c-maml")
        for p in ("p98", "p90")
    ],
}


def error_of_the_mean(record: ResultRecord) -> float:
    assert record.std is not None
    return record.std / math.sqrt(len(record.values))


@pytest.mark.parametrize("table", PAIRS)
def test_sparse_methods_are_at_least_level_with_their_parents(table: str, tmp_path: Path) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "wheretolearn", "reproduce", table, "--scale", "quick", "--device", "cpu"],
        cwd=tmp_path,
        check=True,
        env={**os.environ, "WHERETOLEARN_COMMIT": "0123456789"},
    )
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    # Five minutes on two cores, told by what they had to do, not by what else they did.
    assert used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime < 2 * 300
    records = {(own.name, own.metric): own for own in load_records(tmp_path / "results" / "quick")}
    for sparse, parent, measure in PAIRS[table]:
        ours, theirs = (records[record_name(name, "quick"), measure] for name in (sparse, parent))
        assert ours.mean is not None
        assert theirs.mean is not None
        noise = math.hypot(error_of_the_mean(ours), error_of_the_mean(theirs))
        assert ours.mean - theirs.mean > -noise, (sparse, ours.values, theirs.values)
        assert ours.sparsity is not None
        assert ours.sparsity > 0
