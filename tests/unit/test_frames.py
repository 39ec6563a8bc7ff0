"""Variables of functions that run."""

import gc
import sys
import weakref

from msrun.parallel.foreach.frames import variables_of


class Thing:
    pass


def test_a_frame_keeps_nothing_of_what_was_looked_at():
    thing = Thing()
    reference = weakref.ref(thing)
    count = 3

    assert variables_of(sys._getframe())["count"] == count
    assert variables_of(sys._getframe())["thing"] is thing

    del thing
    gc.collect()
    assert reference() is None
    assert count == 3


def test_a_module_keeps_its_variables():
    scope = {"variables_of": variables_of, "sys": sys, "number": 1}
    exec("found = variables_of(sys._getframe())", scope)

    assert scope["found"]["number"] == 1
    assert scope["number"] == 1
