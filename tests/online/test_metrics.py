"""Detection, recovery and accuracies by source, on cases small enough to work out by hand."""

import torch

from wheretolearn.online.metrics import Detection, accuracy_by_source, detection, recovery


def marks(length, *steps):
    found = torch.zeros(length, dtype=torch.bool)
    found[list(steps)] = True
    return found


def test_alarms_are_held_against_true_changes():
    # Changes at 4 (alarm 2 late), 10 (none before 12), 12 (at once), 18 (none). False: 2 (no change yet), 7 and 14
    # (already noticed). The first step of a stream is neither a change nor an alarm.
    switched = marks(20, 0, 4, 10, 12, 18)
    detected = marks(20, 0, 2, 6, 7, 12, 14)
    assert detection(switched, detected) == Detection(precision=2 / 5, recall=2 / 4, delay=1.0)


def test_the_first_step_counts_neither_as_a_change_nor_as_an_alarm():
    changes, alarms = (3, 6), (4, 5)
    accuracies = torch.linspace(0, 1, 9, dtype=torch.float64)
    plain = detection(marks(9, *changes), marks(9, *alarms))
    assert plain == Detection(precision=1 / 2, recall=1 / 2, delay=1.0)
    assert detection(marks(9, 0, *changes), marks(9, 0, *alarms)) == plain
    assert detection(marks(9, *changes), marks(9, 0, *alarms)) == plain
    assert recovery(accuracies, marks(9, 0, *changes)) == recovery(accuracies, marks(9, *changes))


def test_nothing_to_detect_and_nothing_detected():
    assert detection(marks(5, 0), marks(5)) == Detection(None, None, None)
    assert detection(marks(5, 0, 3), marks(5)) == Detection(None, 0.0, None)
    assert detection(marks(5, 0), marks(5, 2)) == Detection(0.0, None, None)


def test_recovery_is_the_mean_by_step_of_the_task_without_the_first_task():
    accuracies = torch.tensor([0.9, 0.9, 0.1, 0.5, 0.8, 0.3, 0.7, 0.2], dtype=torch.float64)
    means, counts = recovery(accuracies, marks(8, 0, 2, 5, 7))
    assert counts == [3, 2, 1]
    assert torch.allclose(torch.tensor(means), torch.tensor([0.2, 0.6, 0.8]))


def test_recovery_of_a_stream_without_changes_is_empty():
    assert recovery(torch.ones(4), marks(4, 0)) == ([], [])


def test_recovery_looks_at_no_more_steps_than_wanted():
    means, counts = recovery(torch.ones(9), marks(9, 0, 1), steps=3)
    assert (means, counts) == ([1.0] * 3, [1] * 3)


def test_accuracy_by_source_is_of_the_steps_so_far():
    accuracies = torch.tensor([0.2, 0.4, 1.0])
    source = torch.tensor([1, 1, 0, 2, 2])
    found = accuracy_by_source(accuracies, source, ("a", "b", "c"))
    assert found.keys() == {"a", "b"}
    assert found["a"] == 1.0
    assert abs(found["b"] - 0.3) < 1e-6
