from __future__ import annotations

import pytest

from amp_patch.diagnose import wording


@pytest.mark.parametrize(
    ("share", "words"),
    [(0, "0 %"), (1e-9, "<0.1 %"), (0.0234, "2.3 %"), (0.99, "99 %"), (0.996, ">99 %"), (1, "100 %")],
)
def test_only_all_and_none_are_written_as_such(share, words):
    assert wording.percent(share) == words


def test_a_time_is_rounded_to_its_known_digits():
    times = [0, 9, 14, 94, 95, 360, 5399, 5400, 35000, 90000]
    assert [wording.about(seconds) for seconds in times] == [
        *("under 10 seconds", "under 10 seconds", "about 10 seconds", "about 90 seconds", "about 2 minutes"),
        *("about 6 minutes", "about 90 minutes", "about 1.5 hours", "about 9.7 hours", "about 25 hours"),
    ]


def test_a_level_is_named_with_its_type():
    assert wording.level_name("O2", "float16") == "O2 FP16" and wording.level_name("O0", None) == "O0"
    assert wording.type_name("int8") == "int8"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        *((0.123, "0.12 s"), (1.26, "1.3 s"), (41.4, "41 s"), (59.7, "1 min"), (310, "5 min 10 s")),
        *((3599.6, "1 h"), (7500, "2 h 5 min"), (1e7, "2,777 h 47 min")),
    ],
)
def test_a_time_has_its_two_largest_units(seconds, words):
    assert wording.clock_time(seconds) == words
