"""Profiles in a real kernel are shown as live views with static forms, and the number of live views is limited."""

from __future__ import annotations

from tests.support.kernel import Kernel

SETUP = """
from notebook_accelerate.launch.report.document import Section, Text
from notebook_accelerate.launch.report.rendering import DocumentView
from notebook_accelerate.widgets import profile_panel
from tests.support.timelines import training

class Profile(DocumentView):
    timeline = training(ranks=1, steps=1, ops=4)
    def summary(self): return Section(key="summary", nodes=(Text(lines=("sentences",)),))
    def tables(self): return Section(key="tables", nodes=())
    def document(self): return Section(key="profile", nodes=(Text(lines=("static form",)),))

def show():
    assert profile_panel.show(Profile())
    seen.append(profile_panel._live._panels[-1])

seen = []
"""


def test_a_live_view_has_a_static_form_and_the_oldest_of_many_become_static() -> None:
    with Kernel() as kernel:
        kernel.check(SETUP)
        shown = [bundle for bundle in kernel.check("show()").displays if bundle != {"text/plain": ""}]
        assert "application/vnd.jupyter.widget-view+json" in shown[0]
        assert "text/html" not in shown[0]
        assert "static form" in shown[1]["text/html"]
        for _ in range(5):
            kernel.check("show()")
        alive = kernel.check("print([each.view.comm is not None for each in seen])").stdout
        assert alive.strip() == "[False, False, True, True, True, True]"


def test_no_widget_is_created_for_a_client_without_a_front_end() -> None:
    with Kernel() as kernel:
        kernel.check(SETUP.replace("assert", "return"))
        cell = kernel.check(
            "get_ipython().kernel.get_parent()['content']['allow_stdin'] = False\n"
            "print(show(), profile_panel._live._panels)"
        )
        assert cell.stdout.strip() == "False []"
