# SPDX-License-Identifier: Apache-2.0
"""The page on switching says what switches do."""

from tests.battery.switch_table import PAGE, written


def test_the_table_of_what_a_switch_keeps_is_that_of_the_code() -> None:
    page = PAGE.read_text()
    assert page == written(page), "python -m tests.battery.switch_table"
