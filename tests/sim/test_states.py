import state_tables


def test_the_tables_of_the_page_are_current():
    text = state_tables.PAGE.read_text()

    assert text == state_tables.page(text), "run python scripts/state_tables.py"
