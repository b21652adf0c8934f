"""The columns that every table of text has."""

from __future__ import annotations

from amp_patch.diagnose.text_table import in_columns


def test_columns_are_as_wide_as_their_widest_cell_and_lines_end_with_a_word():
    rows = [("level", "batch", "note"), ("O2 FP16", "8", ""), ("O0",)]
    assert in_columns(rows, right=[1]) == ["level    batch  note", "O2 FP16      8", "O0"]
    assert in_columns([]) == []


def test_a_cell_that_is_wider_than_its_column_is_whole():
    assert in_columns([("abc", "d"), ("e", "f")], widths=(2, 1), gap=" ") == ["abc d", "e  f"]
