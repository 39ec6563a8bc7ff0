"""Any layout loads what any other saved, and goes on with the losses of one process."""

import pytest
from checkpoint_layouts import (
    LAYOUTS,
    SAVED_AFTER,
    expected_losses,
    from_few_and_from_all,
    resume_all,
    save_early,
)
from ranks import assert_equal_curves, run_warm

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one checkpoint of each layout."""
    folder = tmp_path_factory.mktemp("saved")
    for name, layout in LAYOUTS.items():
        found = run_warm(save_early, layout.world_size, name, folder)
        assert_equal_curves(found, expected_losses()[:SAVED_AFTER])
    return folder


@pytest.mark.parametrize(("name", "sources"), from_few_and_from_all(LAYOUTS))
@pytest.mark.few(4)
def test_goes_on_from_any_layout(saved, name, sources):
    expected = expected_losses()[SAVED_AFTER:]

    found = run_warm(resume_all, LAYOUTS[name].world_size, name, saved, ["", *sources])

    for source in sources:
        assert_equal_curves([losses[source] for losses in found], expected)
    for losses in found:
        worst = max(abs(a - b) for a, b in zip(losses[""], expected, strict=True))
        assert worst > 1e-2, "without loading the curve is another one"
