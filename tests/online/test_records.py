"""Records of online runs that stand in for one another."""

from dataclasses import replace

import pytest

from wheretolearn.config import to_dict
from wheretolearn.errors import UserError
from wheretolearn.online.config import OnlineConfig
from wheretolearn.online.records import ONLINE
from wheretolearn.runs.results import ResultRecord, save_records


def test_settings_without_effect_keep_no_record_from_being_replaced(tmp_path):
    config = OnlineConfig(learner="bgd")

    def save(**changes):
        own = to_dict(replace(config, **changes))
        record = ResultRecord("table6.bgd.p98", "accuracy", values=(1.0,), seeds=(0,), config=own)
        return save_records([record], tmp_path, ONLINE.incidental, ONLINE.settings)

    save()
    assert save(buffer=7)  # bgd has none
    with pytest.raises(UserError, match="with other settings: samples=5 there, 7 here"):
        save(samples=7)


def test_a_setting_that_an_older_record_lacks_counts_as_its_default(tmp_path):
    def save(older=False, **changes):
        own = to_dict(OnlineConfig(**changes))
        if older:
            del own["adapt"]
        record = ResultRecord("table6.sparse-c-maml.p98", "accuracy", values=(1.0,), seeds=(0,), config=own)
        return save_records([record], tmp_path, ONLINE.incidental, ONLINE.settings)

    save(older=True)
    for adapt in ("head", ("block4.*", "head.*")):
        with pytest.raises(UserError, match=r'with other settings: adapt="all" there, .* here'):
            save(adapt=adapt)
    assert save()
