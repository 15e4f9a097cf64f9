"""The config panel: forms for a launch and its training, the resulting plan, and the cell that launches it."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from notebook_accelerate import hardware, launch
from notebook_accelerate._mistakes import reports_mistakes
from notebook_accelerate.config.config_file import ClusterConfig, default_config_file
from notebook_accelerate.config.launch_config import LaunchConfig
from notebook_accelerate.hardware import HardwareInfo
from notebook_accelerate.launch import KernelFacts, LaunchPlan, Run, run_registry
from notebook_accelerate.launch.output.replaceable_outputs import Output
from notebook_accelerate.launch.output.running_cell import published_under
from notebook_accelerate.launch.processes.fork_probe import fork_hazard, kernel_facts
from notebook_accelerate.launch.report.document import Drawing, Section, Text
from notebook_accelerate.launch.report.markup import Markup, element, join
from notebook_accelerate.launch.run import add_ending_callback, without_results
from notebook_accelerate.launch.starting import check_function
from notebook_accelerate.widgets.config_file_form import (
    RUN_VARIABLE,
    arguments_code,
    as_tuple,
    chips,
    compile_settings,
    details,
    file_contents,
    launch_cell,
    machine_summary,
    name_of,
    plan_sentence,
    read_settings,
    settings_not_in_file,
    too_many_ranks,
    training_functions,
    write_settings,
)
from notebook_accelerate.widgets.fields import groups_of
from notebook_accelerate.widgets.forms import Form, FormView, Part, in_words
from notebook_accelerate.widgets.live_panel import Panel
from notebook_accelerate.widgets.memory_panel import MemoryCheck
from notebook_accelerate.widgets.panel_elements import alert, guide_link, notice
from notebook_accelerate.widgets.training_options import TrainingOptions

FACTS_SECONDS = 10.0
"""How long the result of the fork probe is reused, in seconds. A probe for each keystroke would be too slow."""


@dataclass(kw_only=True)
class Call:
    """The call that the Launch button makes."""

    function: str = field(default="", metadata={"label": "Function", "placeholder": "e.g. train"})
    """Name of the training function."""
    arguments: str = field(default="", metadata={"label": "Arguments", "placeholder": "e.g. model"})
    """The arguments of the function, separated by commas."""


@dataclass(kw_only=True)
class SettingsFile:
    """The file that the Load and Save buttons use."""

    path: str = field(default=str(default_config_file), metadata={"label": "Path"})
    """Accelerate's configuration file, YAML or JSON."""


class ConfigPanel(Panel):
    """A form for a launch, which checks values as you type, shows the plan, and starts the launch.

    Args:
        function: The training function. If None, the user chooses one in the panel.
        args: The arguments that the Launch button passes to the function.
        config: The initial launch settings. If None, these are the defaults with ``block=False``, so that the
            notebook stays usable.
        training: The initial training options.
        machine: The hardware. If None, this machine's hardware is detected.
        facts: Returns the facts about the kernel. If None, they are detected.
        model: The model to train, a function that returns it, or a transformers configuration. The panel warns if the
            training does not fit in memory.
        memory: Further arguments of `estimate_memory`, such as optimizer, sequence_length, inputs.
    """

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        args: Iterable[Any] = (),
        *,
        config: LaunchConfig | None = None,
        training: TrainingOptions | None = None,
        machine: HardwareInfo | None = None,
        facts: Callable[[], KernelFacts] | None = None,
        model: Any = None,
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self.hardware = machine or hardware.detect()
        self.runs: list[Run] = []
        self._facts = facts or self._detect_facts
        self._hazard: str | None = None
        self._hazard_checked = 0.0
        self._function, self._arguments = function, tuple(args)
        self._memory_check = MemoryCheck(model, memory) if model is not None else None
        self._lock = threading.RLock()
        self._cluster: ClusterConfig | None = None
        self._own_files: set[Path] = set()
        self._parent: Any = None
        self._hidden_arguments: dict[str, Any] = {}
        self._wrong_notes: set[str] = set()
        config = config or LaunchConfig(block=False)
        self.launch_form = Form(
            LaunchConfig,
            config.changed(accelerator=None),
            title="Launch",
            names=[name for _, names in groups_of(LaunchConfig) for name in names],
            on_change=self._changed,
            lock=self._lock,
        )
        if config.accelerator:
            training, self._hidden_arguments = (training or TrainingOptions()).with_arguments(config.accelerator)
        self.training_form = Form(
            TrainingOptions,
            training,
            title="Training",
            on_change=self._changed,
            lock=self._lock,
        )
        given = Call(
            function=name_of(function) if function is not None else "",
            arguments=arguments_code(self._arguments, _namespace()),
        )
        self.call_form = Form(Call, given, on_change=self._changed, lock=self._lock)
        self.file_form = Form(SettingsFile, on_change=self._changed, lock=self._lock)
        super().__init__()
        self.refresh()

    # ---- values

    @property
    def config(self) -> LaunchConfig:
        """The launch settings, with the training options as the arguments of every ``Accelerator()``.

        Raises:
            ValueError: Some entries are not allowed; the message has a line for each.
        """
        config: LaunchConfig = self.launch_form.value
        shown = self.training.accelerator()
        given = {**self._hidden_arguments, **shown}
        if handlers := [*self._hidden_arguments.get("kwargs_handlers", ()), *shown.get("kwargs_handlers", ())]:
            given["kwargs_handlers"] = handlers
        return config.changed(accelerator=given or None)

    @config.setter
    def config(self, config: LaunchConfig) -> None:
        with self._lock:
            if config.accelerator:
                training = self.training_form.checked.value or TrainingOptions()
                self.training_form.value, self._hidden_arguments = training.with_arguments(config.accelerator)
            self.launch_form.value = config.changed(accelerator=None)

    @property
    def training(self) -> TrainingOptions:
        """The training options.

        Raises:
            ValueError: Some entries are not allowed.
        """
        return self.training_form.value  # type: ignore[no-any-return]

    @training.setter
    def training(self, training: TrainingOptions) -> None:
        self.training_form.value = training

    def change(self, **values: Any) -> None:
        """Set fields from code, as if the user had typed the values into the panel.

        Args:
            **values: Fields of LaunchConfig or of TrainingOptions, with values of their types.

        Raises:
            ValueError: A field is unknown, or a value is not allowed. In either case, nothing is changed.
        """
        launching = {name: value for name, value in values.items() if name in LaunchConfig.__dataclass_fields__}
        training = {name: value for name, value in values.items() if name in TrainingOptions.__dataclass_fields__}
        if unknown := sorted(values.keys() - launching.keys() - training.keys()):
            known = ", ".join([*LaunchConfig.__dataclass_fields__, *TrainingOptions.__dataclass_fields__])
            raise ValueError(f"there is no field {unknown[0]!r}; pass one of: {known}")
        config, options = self.launch_form.value.changed(**launching), replace(self.training, **training)
        self.training_form.value = options
        self.config = config

    @property
    def errors(self) -> dict[str, str]:
        """Errors by field. The error of a launch that does not fit this machine is under ""."""
        wrong = {**self.launch_form.errors, **self.training_form.errors}
        if not wrong:
            try:
                self._plan(self.config)
            except ValueError as error:
                wrong[""] = str(error)
        return wrong

    @property
    def plan(self) -> LaunchPlan:
        """The plan of the launch.

        Raises:
            ValueError: Some entries are not allowed, or do not fit this machine.
        """
        return self._plan(self.config)

    @property
    def sentence(self) -> str:
        """The plan in a sentence, or the errors."""
        if errors := self.errors:
            return " · ".join(errors.values())
        return plan_sentence(self.plan, self.config, self.training)

    @property
    def warning(self) -> str:
        """A warning if the training does not fit in memory, or "" if it fits or no model was given."""
        if self._memory_check is None or self.errors:
            return ""
        return self._memory_check.warning(self.plan, self.training, self.hardware, self.config.env)

    @property
    def caution(self) -> str:
        """A caution if there are more processes than CPU cores, or "" if there are not."""
        return "" if self.errors else too_many_ranks(self.plan, self.hardware)

    @property
    def code(self) -> str:
        """The cell that does the same as the Launch button, or a comment with the errors."""
        if errors := self.errors:
            return "\n".join(f"# {line}" for error in errors.values() for line in error.splitlines())
        return self._cell(hidden=False)

    def _shown_cell(self, errors: Mapping[str, str]) -> str:
        """Return the cell without secrets. Errors are shown next to their fields, not in the cell."""
        return f"# {self._to_correct(errors)}" if errors else self._cell(hidden=True)

    def _to_correct(self, errors: Mapping[str, str]) -> str:
        """Return a sentence that names the fields to correct, whose errors are shown next to them."""
        labels = dict.fromkeys(self._labels[path.partition(".")[0]] for path in errors if path)
        names = ", ".join(f'"{label}"' for label in labels) or "the launch"
        return f"Correct {names} to see the plan and the cell."

    @property
    def _labels(self) -> dict[str, str]:
        fields = {**self.launch_form.fields, **self.training_form.fields}
        return {name: entry.label for name, entry in fields.items()}

    def _cell(self, *, hidden: bool) -> str:
        call = self.call_form.value
        return launch_cell(call.function or "train", as_tuple(call.arguments), self.config, hidden=hidden)

    def launch(self, function: Callable[..., Any] | None = None, args: Iterable[Any] | None = None) -> Run:
        """Start the configured run.

        Args:
            function: The training function. If None, the one chosen in the panel is used.
            args: The function's arguments. If None, those entered in the panel are used.

        Returns:
            The run, which is also appended to ``runs``.

        Raises:
            ValueError: Some entries are not allowed, or no function was chosen.
            LaunchError: The run could not be started.
            WorkerError: A blocking run failed.
        """
        function = function or self._chosen_function()
        arguments = self._chosen_arguments() if args is None else tuple(args)
        return self._keep(launch.start(self.config, function, arguments))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Load one of Accelerate's configuration files, and keep the settings that such files do not contain.

        Args:
            path: A YAML or JSON file.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: The file contains unknown keys or values.
        """
        now = self.launch_form.checked.value or LaunchConfig(block=False)
        file = Path(path).expanduser()
        cluster, config = read_settings(file, now, self._cluster)
        plugin = compile_settings(cluster)
        with self._lock:
            self._cluster = cluster
            self._own_files.add(file.resolve())
            self.config = config
            training = self.training_form.checked.value or TrainingOptions()
            training.dynamo_plugin = plugin
            self.training = training

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Save the settings as one of Accelerate's configuration files, and return its path.

        Args:
            path: The file to write, which replaces an existing one. JSON if the name ends in .json, otherwise YAML.

        Raises:
            ValueError: Some entries are not allowed.
        """
        file = write_settings(path, self._cluster_config())
        self._own_files.add(file.resolve())
        return file

    def _cluster_config(self) -> ClusterConfig:
        return file_contents(self.launch_form.value, self.training, self.hardware, self._cluster)

    def close(self) -> None:
        """Replace the live form with the static one in every cell. The panel can still be displayed again."""
        self._shown.end()

    # ---- planning

    def _plan(self, config: LaunchConfig) -> LaunchPlan:
        return launch.make_plan(config, self.hardware, self._facts())

    def _detect_facts(self) -> KernelFacts:
        return replace(kernel_facts(), fork_hazard=self._fork_hazard)

    def _fork_hazard(self) -> str:
        if self._hazard is None or time.monotonic() - self._hazard_checked > FACTS_SECONDS:
            self._hazard, self._hazard_checked = fork_hazard(), time.monotonic()
        return self._hazard

    # ---- the widget

    def _build(self) -> FormView:
        forms = {
            "launch": self.launch_form,
            "training": self.training_form,
            "file": self.file_form,
            "call": self.call_form,
        }
        load = Part(kind="button", id="load", title="Load", hint="Read this configuration file")
        save = Part(kind="button", id="save", title="Save", hint="Write this configuration file")
        launch = Part(kind="button", id="launch", title="Launch", hint="Start this run", style="na-primary")
        file = Part(kind="box", style="na-file", parts=(*self.file_form.parts("file"), load, save))
        tabs = (
            Part(kind="tab", title="Launch", parts=self.launch_form.parts("launch")),
            Part(kind="tab", title="Training", parts=self.training_form.parts("training")),
            Part(kind="tab", title="Configuration file", parts=(file, Part(kind="text", id="file"))),
        )
        cell_head = (Part(kind="text", id="caption"), Part(kind="copy", id="cell", title="Copy this cell"))
        parts = (
            Part(kind="text", id="title"),
            Part(kind="text", id="plan"),
            Part(kind="tabs", parts=tabs),
            Part(kind="box", style="na-launch", parts=(*self.call_form.parts("call"), launch)),
            Part(kind="text", id="run"),
            Part(kind="box", style="na-cell-head", parts=cell_head),
            Part(kind="text", id="cell"),
        )
        view = FormView(forms, parts, self.click)
        view.add_class("na-config")
        title = element("h3", "Configure a launch", guide_link("form"), class_="na-title")
        caption = element("span", "A cell that starts the same launch", class_="na-help")
        view.show(title=join([title, chips(self.hardware)]), caption=caption, run="", file="")
        return view

    def refresh(self) -> None:
        """Update the plan and the cell."""
        with self._lock, self.widget.one_message():
            errors = self.errors
            shown = self._shown_cell(errors)
            cell = element("pre", shown, class_="na-code", tabindex=0, aria_label="The cell")
            self.widget.show(plan=self._plan_html(errors), cell=cell)
            self.widget.code = shown if errors else self.code
            self.widget.disabled = ["launch", "cell"] if errors else []
            self.widget.suggestions = {"call.function": training_functions(_namespace())}
        self._shown.leave()

    def _plan_html(self, errors: dict[str, str]) -> Markup:
        if errors:
            text = (
                alert(in_words(errors[""], self._labels))
                if "" in errors
                else element("span", self._to_correct(errors), role="status")
            )
            return element("div", text, class_="na-plan na-wrong")
        plan, training = self.plan, self.training
        small = details(plan, training)
        small += ["Launch starts it in the background; the cell below waits until it ends"] if self.config.block else []
        lines = [element("strong", plan_sentence(plan, self.config, training))]
        lines.append(element("span", " · ".join(small), class_="na-help"))
        lines += [element("span", caution, class_="na-caution")] if (caution := self.caution) else []
        lines += [alert(warning)] if (warning := self.warning) else []
        return element("div", join(lines, "<br>"), class_="na-plan", role="status")

    def _changed(self) -> None:
        self.widget.show(**dict.fromkeys(self._wrong_notes, ""))
        self._wrong_notes.clear()
        self._guarded(self.refresh, "run")

    def _guarded(self, action: Callable[[], None], note: str) -> None:
        """Run the action of a click or a keystroke, and show its errors in the panel instead of raising them.

        Args:
            action: The function to call.
            note: The key of the text that shows an error.
        """
        try:
            action()
        except Exception as error:  # noqa: BLE001 - shown next to the button
            self.widget.show(**{note: alert(f"{type(error).__name__}: {error}")})
            self._wrong_notes.add(note)

    # ---- clicks

    def click(self, button: str) -> None:
        """Handle a click on "launch", "load" or "save"."""
        action, note = {
            "launch": (self._launch_clicked, "run"),
            "load": (self._load_clicked, "file"),
            "save": (self._save_clicked, "file"),
        }[button]
        self._guarded(action, note)

    def _launch_clicked(self) -> None:
        self.widget.show(run=notice("Starting …"))
        function, arguments = self._chosen_function(), self._chosen_arguments()
        with published_under(self._parent):
            run = launch.start(self.config.changed(block=False), function, arguments)
        _namespace()[RUN_VARIABLE] = run  # Launch as the cell shown in the panel would.
        self._show_run(run)
        add_ending_callback(self._keep(run), self._show_run)

    def _show_run(self, run: Run) -> None:
        text = f"run {run.id} {run.status}" + (f" in {run.elapsed:.1f} s" if run.ended else f", as {RUN_VARIABLE!r}")
        if run.error is not None:
            self.widget.show(run=alert(f"{text}: {run.error}"))
        else:
            self.widget.show(run=notice(text, "na-good" if run.status == "succeeded" else "na-help"))

    def _keep(self, run: Run) -> Run:
        self.runs.append(run)
        old = self.runs[: -run_registry.KEPT_RESULTS]
        self.runs[: len(old)] = [each if each.ended is None else without_results(each) for each in old]
        return run

    def _load_clicked(self) -> None:
        self.load(self.file_form.value.path)
        self.widget.show(file=notice("Loaded.", "na-good"))

    def _save_clicked(self) -> None:
        path = Path(self.file_form.value.path).expanduser().resolve()
        if path.exists() and path not in self._own_files:
            self._own_files.add(path)
            self.widget.show(file=alert(f"{path} exists. Click Save again to replace it."))
            return
        self.save(path)
        missing = settings_not_in_file(self.launch_form.value, self.training, self._cluster_config())
        more = f" Not stored: {', '.join(missing)}." if missing else ""
        self.widget.show(file=notice(f"Saved.{more}", "na-good"))

    def _chosen_function(self) -> Callable[..., Any]:
        name = self.call_form.value.function
        if self._function is not None and name in {"", name_of(self._function)}:
            return self._function
        if not name:
            raise ValueError("enter the name of a function in this notebook, or call panel.launch(train, (arguments,))")
        found = _namespace().get(name)
        if not callable(found):
            known = ", ".join(training_functions(_namespace())) or "none"
            raise ValueError(f"{name!r} is not a function in this notebook; enter one of: {known}")
        return found  # type: ignore[no-any-return]

    def _chosen_arguments(self) -> tuple[Any, ...]:
        text = as_tuple(self.call_form.value.arguments)
        return tuple(eval(text, dict(_namespace()))) if text else self._arguments  # noqa: S307 - as in a cell

    # ---- display

    def _title(self) -> str:
        return "Settings of a launch"

    def document(self) -> Section:
        """Return the static form of the panel: the plan, the settings and the cell."""
        lines = filter(None, [self.sentence, self.caution, self.warning, machine_summary(self.hardware)])
        forms = (self.launch_form, self.training_form)
        settings = (Drawing(html=form.html, text=f"{form.title}\n{form.text}") for form in forms)
        cell = Text(lines=(self._shown_cell(self.errors),), tone="code")
        return Section(key="settings", nodes=(Text(lines=tuple(lines)), *settings, cell))

    def _show_in(self, output: Output) -> None:
        """Show the live panel. A saved notebook contains its static form instead."""
        self._parent = output.parent
        self._guarded(self.refresh, "run")
        super()._show_in(output)


@reports_mistakes
def configure(
    function: Callable[..., Any] | None = None,
    args: Iterable[Any] = (),
    *,
    config: LaunchConfig | None = None,
    model: Any = None,
    memory: Mapping[str, Any] | None = None,
) -> ConfigPanel:
    """Return a panel that configures and starts a launch. Make it the last expression of a cell to display it.

    Args:
        function: The training function. If None, the user chooses one in the panel.
        args: The arguments that the Launch button passes to the function.
        config: The initial launch settings.
        model: The model to train, a function that returns it, or a transformers configuration. The panel warns if the
            training does not fit in memory.
        memory: Further arguments of `estimate_memory`, such as optimizer, sequence_length, inputs.

    Raises:
        ValueError: ``function`` is not a function that can be launched.
    """
    if function is not None:
        check_function(function)
    return ConfigPanel(function, args, config=config, model=model, memory=memory)


def _namespace() -> dict[str, Any]:
    """Return the variables of the notebook, which IPython keeps in ``__main__``."""
    return vars(sys.modules["__main__"])
