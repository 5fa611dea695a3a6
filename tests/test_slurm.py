"""Words of Slurm, understood. What a job asks of it is tested by whole jobs in test_stool.py."""

import pytest

from lingua.slurm import seconds_of


@pytest.mark.parametrize(
    ("time", "seconds"),
    [
        ("90", 5400),
        ("1:30", 90),
        ("2:00:30", 7230),
        ("1-0", 86400),
        ("1-2:30", 95400),
        ("1-02:30:05", 95405),
        ("UNLIMITED", None),
        ("0", None),
        ("soon", None),
    ],
)
def test_a_time_limit_in_any_form_of_sbatch_is_so_many_seconds(time, seconds) -> None:
    assert seconds_of(time) == seconds
