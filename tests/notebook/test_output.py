"""Output, displays and prompts of ranks appear under the cell that launched them."""

from __future__ import annotations

import re
import time
from typing import Any

import psutil
import pytest

from notebook_accelerate.launch.output.output_budget import HEAD_BYTES
from tests.notebook.conftest import Answers
from tests.support.kernel import Cell, Kernel
from tests.support.launching import PAST_THE_CALL, open_gate, said

pytestmark = pytest.mark.notebook
METHODS = pytest.mark.parametrize("method", ["fork", "zygote", pytest.param("spawn", marks=pytest.mark.nightly)])
METHODS = pytest.mark.parametrize("method", ["fork", "zygote"])


@METHODS
def test_lines_of_a_background_run_belong_to_the_cell_that_launched_it(kernel: Kernel, method: str) -> None:
    launching = kernel.check(
        "def talk():\n    for number in range(10):\n        print('from the rank', number)\n"
        "        gate(f'talk {start}') if number == 4 else time.sleep(0.01)\n"
        f"start = {method!r}\nrun = launch(talk, block=False, start_method=start)"
    )
    assert "from the rank 5" not in launching.stdout
    other = kernel.check(f"print('other'); open('talk {method}', 'w').close(); run.wait(); print('done')")
    kernel.wait_for(lambda: launching.stdout.count("from the rank 9") == 2)
    assert other.stdout == "other\ndone\n"
    lines = [line for line in launching.stdout.splitlines() if "from the rank" in line]
    assert len(lines) == 20
    assert all(re.fullmatch(r"\[rank [01]\] from the rank \d", line) for line in lines)
    kernel.check("run.wait()")


def test_two_runs_print_under_their_own_cells(kernel: Kernel) -> None:
    code = "run{0} = launch(lambda: [(print('run {0}'), time.sleep(0.05)) for _ in range(5)] and None, block=False)"
    first, second = kernel.check(code.format(1)), kernel.check(code.format(2))
    kernel.check("run1.wait(), run2.wait()")
    kernel.wait_for(lambda: first.stdout.count("run 1") >= 10 and second.stdout.count("run 2") >= 10)
    assert "run 2\n" not in first.stdout
    assert "run 1\n" not in second.stdout


@METHODS
def test_stdout_stderr_and_output_of_c_code_are_kept_apart(kernel: Kernel, method: str) -> None:
    cell = kernel.check(
        "def talk():\n    print('out')\n    print('err', file=sys.stderr)\n    os.system('echo shell; echo bad >&2')\n"
        "    libc = ctypes.CDLL(None)\n    libc.puts(b'from C'); libc.fflush(None)\n"
        "    os.write(1, b'raw\\n')\n    import logging, warnings\n    logging.getLogger('x').warning('logged')\n"
        "    warnings.warn('warned')\n"
        f"launch(talk, num_processes=1, start_method={method!r});"
    )
    out = [line for line in cell.stdout.splitlines() if line.startswith("[rank 0]")]
    assert out == ["[rank 0] out", "[rank 0] shell", "[rank 0] from C", "[rank 0] raw"]
    assert "[rank 0] err\n[rank 0] bad\n" in cell.stderr
    assert "logged" in cell.stderr
    assert "UserWarning: warned" in cell.stderr


def test_streams_saved_in_the_kernel_write_to_the_ranks_streams(kernel: Kernel) -> None:
    cell = kernel.check(
        "import logging\nlogger = logging.getLogger('saved'); logger.addHandler(logging.StreamHandler())\n"
        "logger.propagate = False; saved = sys.stdout\n"
        "def talk():\n    logger.warning('logged'); saved.write('written\\n')\n"
        "launch(talk, start_method='fork');"
    )
    assert sorted(line for line in cell.stderr.splitlines() if "logged" in line) == [
        "[rank 0] logged",
        "[rank 1] logged",
    ]
    assert sorted(line for line in cell.stdout.splitlines() if "written" in line) == [
        "[rank 0] written",
        "[rank 1] written",
    ]


@METHODS
def test_c_output_without_a_flush_is_not_lost(kernel: Kernel, method: str) -> None:
    cell = kernel.check(
        f"def talk():\n    ctypes.CDLL(None).puts(b'buffered in C')\nlaunch(talk, start_method={method!r});"
    )
    assert cell.stdout.count("] buffered in C\n") == 2


@METHODS
def test_buffered_output_of_the_kernel_is_not_printed_again(kernel: Kernel, method: str) -> None:
    cell = kernel.check(f"print('once', end='')\nlaunch(rank, start_method={method!r});")
    assert cell.stdout.count("once") == 1


@METHODS
def test_display_arrives_as_display_data_and_is_updated(kernel: Kernel, method: str) -> None:
    cell = kernel.check(
        "def show():\n    from IPython.display import HTML, display\n    import pandas as pd\n"
        "    handle = display(HTML('<i>first</i>'), display_id=f'own-{rank()}')\n"
        "    handle.update(HTML('<i>second</i>'))\n"
        "    display(pd.DataFrame({'a': [rank()]}))\n"
        f"launch(show, start_method={method!r});"
    )
    html = [data.get("text/html", "") for data in cell.displays]
    html = [text for text in html if "notebook-accelerate-report" not in text]  # Leave out the panel's report.
    assert html.count("<i>second</i>") == 2
    assert not any("first" in text for text in html)
    assert sum("<table" in text for text in html) == 2
    assert cell.stdout.count("<IPython.core.display.HTML") == 0


def _shown_in_order(cell: Cell) -> list[str]:
    """Return the ranks' lines and HTML in the order in which the cell shows them."""
    shown = []
    for output in cell.outputs:
        if output["output_type"] == "stream":
            shown += output["text"].splitlines()
        elif output["output_type"] == "display_data" and "<b>" in output["data"].get("text/html", ""):
            shown.append(output["data"]["text/html"])
    return [text for text in shown if "▶" not in text]


@METHODS
def test_text_and_displays_of_a_rank_keep_their_order(kernel: Kernel, method: str) -> None:
    cell = kernel.check(
        "from IPython.display import HTML, display\n"
        "def show():\n    for i in range(30):\n        print('text', i)\n        display(HTML(f'<b>{i}</b>'))\n"
        "    print('to stderr', file=sys.stderr)\n    display(HTML('<b>last</b>'))\n"
        f"launch(show, num_processes=1, start_method={method!r});"
    )
    wanted = [text for i in range(30) for text in (f"[rank 0] text {i}", f"<b>{i}</b>")]
    assert _shown_in_order(cell) == [*wanted, "[rank 0] to stderr", "<b>last</b>"]


def test_displays_have_the_label_of_their_rank(kernel: Kernel) -> None:
    cell = kernel.check(
        "from IPython.display import HTML, display\n"
        "def show():\n    for turn in range(2):\n        for each in (0, 1):\n"
        "            gate(f'{turn} {each}')\n"
        "            if rank() == each:\n                display(HTML(f'<b>of {each}</b>'))\n"
        "                display(HTML(f'<b>also of {each}</b>'))\n                time.sleep(0.5)\n"
        "                open(f'{turn + each} {1 - each}', 'w').close()\n"
        "open('0 0', 'w').close()\nlaunch(show, num_processes=2);"
    )
    turn = ["[rank 0] ", "<b>of 0</b>", "<b>also of 0</b>", "[rank 1] ", "<b>of 1</b>", "<b>also of 1</b>"]
    assert _shown_in_order(cell) == turn * 2


@METHODS
def test_ranks_have_the_logging_setup_and_warning_filters_of_the_notebook(kernel: Kernel, method: str) -> None:
    kernel.check(
        "import logging, warnings\n"
        "class Shouting(logging.Formatter):\n    def format(self, record):\n"
        "        return super().format(record).upper()\n"
        "class Odd(UserWarning): pass\n"
        "class Unpicklable(logging.Handler):\n    def __init__(self):\n        super().__init__()\n"
        "        self.held = threading.Lock()\n    def emit(self, record):\n        print(self.format(record))\n"
        "logging.basicConfig(level=logging.INFO, format='root %(message)s', force=True)\n"
        "logging.root.addHandler(logging.FileHandler('ranks.log', 'w'))\n"
        "mine, other = logging.getLogger('mine'), logging.getLogger('other')\n"
        "mine.propagate = False\nmine.addHandler(logging.StreamHandler(sys.stdout))\n"
        "mine.handlers[0].setFormatter(Shouting('mine %(message)s'))\n"
        "other.propagate = False\nother.addHandler(Unpicklable())\n"
        "logging.getLogger('noisy').setLevel(logging.ERROR)\n"
        "logging.getLogger('torch').setLevel(logging.ERROR)\n"
        "warnings.simplefilter('always')\nwarnings.filterwarnings('ignore', 'quiet.*')\n"
        "warnings.filterwarnings('ignore', category=Odd)\n"
        "def talk():\n"
        "    logging.info('info')\n    logging.debug('hidden')\n    mine.warning('shout')\n    other.warning('held')\n"
        "    logging.getLogger('noisy').warning('hidden')\n    logging.getLogger('torch').warning('hidden')\n"
        "    warnings.warn('quiet please')\n    warnings.warn('of a cell', Odd)\n    warnings.warn('loud')\n"
    )
    cell = kernel.check(f"launch(talk, num_processes=1, start_method={method!r}, panel=False)")
    kernel.check(
        "logging.basicConfig(level=logging.WARNING, force=True); mine.handlers.clear(); other.handlers.clear()"
    )
    kernel.check("warnings.resetwarnings()")
    text = cell.stdout + cell.stderr
    assert [word in text for word in ("root info", "MINE SHOUT", "held", "loud")] == [True] * 4
    assert not [word for word in ("hidden", "quiet", "of a cell") if word in text]
    assert kernel.value("open('ranks.log').read()") == "info\n"


REDACTING = """
import logging, warnings
SECRETS = ["hunter2"]
class Redacts(logging.Filter):
    def filter(self, record):
        for secret in SECRETS:
            record.msg = record.msg.replace(secret, "***")
        return True
def drops(record):
    return "dropped" not in record.getMessage()
def make_record(*arguments, old=logging.getLogRecordFactory(), **options):
    record = old(*arguments, **options)
    record.team = "our team"
    return record
class Chatty(logging.Logger):
    def chat(self, text):
        self.log(35, text)
guarded = logging.getLogger("guarded")
guarded.addFilter(Redacts())
logging.basicConfig(level=logging.INFO, format="%(team)s %(levelname)s %(message)s", force=True)
logging.root.handlers[0].addFilter(drops)
logging.setLogRecordFactory(make_record)
logging.addLevelName(35, "CHAT")
logging.setLoggerClass(Chatty)
warnings.simplefilter("always")
warnings.formatwarning = lambda message, *_: f"shown as {message}\\n"
def talk():
    SECRETS.append("swordfish")
    guarded.warning("hunter2 and swordfish")
    guarded.warning("dropped")
    logging.getLogger("new").chat("hello")
    warnings.warn("plain")
"""
RESTORED = """
logging.setLogRecordFactory(logging.LogRecord); logging.setLoggerClass(logging.Logger); guarded.filters.clear()
logging.basicConfig(level=logging.WARNING, force=True); SECRETS[:] = ["hunter2"]
warnings.resetwarnings(); warnings.formatwarning = kept_formatwarning
"""


@METHODS
def test_ranks_have_the_filters_and_other_parts_of_the_logging_setup(kernel: Kernel, method: str) -> None:
    kernel.check("import warnings; kept_formatwarning = warnings.formatwarning" + REDACTING)
    cell = kernel.check(f"launch(talk, num_processes=1, start_method={method!r}, panel=False)")
    kernel.check(RESTORED)
    text = cell.stdout + cell.stderr
    assert "our team WARNING *** and ***" in text
    assert "our team CHAT hello" in text
    assert "shown as plain" in text
    assert not [word for word in ("hunter2", "swordfish", "dropped", "UserWarning") if word in text]


def test_a_filter_that_cannot_be_pickled_is_reported_once(kernel: Kernel) -> None:
    kernel.check(
        "import logging\nclass Locked(logging.Filter):\n    def __init__(self):\n        self.lock = threading.Lock()\n"
        "guarded = logging.getLogger('guarded')\nguarded.addFilter(Locked())\n"
    )
    launch = "launch(int, start_method='zygote', panel=False)"
    cell, again = kernel.check(launch), kernel.check(launch)
    kernel.check("guarded.filters.clear()")
    assert "without the filter Locked of the logger 'guarded': it cannot be pickled: TypeError" in cell.stderr
    assert "Locked" not in again.stderr


@pytest.mark.parametrize("method", ["fork", "zygote"])
def test_a_handler_whose_stream_is_read_only_follows_the_ranks_stderr(kernel: Kernel, method: str) -> None:
    kernel.check(
        "import logging\nlonely = logging.getLogger('lonely')\nlonely.addHandler(logging._StderrHandler())\n"
        "def warn():\n    logging.getLogger('lonely').warning('followed')\n"
    )
    cell = kernel.check(f"launch(warn, num_processes=1, start_method={method!r}, panel=False)")
    kernel.check("lonely.handlers.clear()")
    assert "followed" in cell.stdout + cell.stderr


@pytest.mark.parametrize("way", ["magic", "redirected"])
@pytest.mark.parametrize("configured", ["before", "in the cell"])
def test_log_lines_of_ranks_reach_a_cell_that_captures_its_output(kernel: Kernel, way: str, configured: str) -> None:
    configure = "logging.basicConfig(level=logging.INFO, format='%(message)s', force=True)"
    kernel.check(
        "import contextlib, io, logging, sys\nkept = sys.stdout\n"
        "def talk():\n    logging.info('logged in %s', os.environ['RANK'])\n    print('kept stream', file=kept)\n"
    )
    launch = "run = launch(talk, start_method='fork', panel=False)"
    if configured == "before":
        kernel.check(configure)
    else:
        launch = f"{configure}; {launch}"
    if way == "magic":
        kernel.check(f"%%capture found\n{launch}")
        kernel.check("text = found.stdout + found.stderr")
    else:
        kernel.check(
            "caught = io.StringIO()\nwith contextlib.redirect_stdout(caught), contextlib.redirect_stderr(caught):\n"
            f"    {launch}\ntext = caught.getvalue()"
        )
    kernel.check("logging.basicConfig(level=logging.WARNING, force=True)")
    found = kernel.value("text.splitlines()")
    assert sorted(line for line in found if line.startswith("[rank")) == sorted(
        f"[rank {rank}] {text}" for rank in (0, 1) for text in (f"logged in {rank}", "kept stream")
    )


def test_a_display_is_shown_while_the_output_is_redirected(kernel: Kernel) -> None:
    """The redirected output must contain no marks for displays."""
    cell = kernel.check(
        "from IPython.display import HTML, display\nimport contextlib, io\n"
        "def show():\n    display(HTML('<b>1</b>'))\n    saved = os.dup(1)\n    file = open('redirected', 'w+b')\n"
        "    os.dup2(file.fileno(), 1)\n    print('to the file')\n    display(HTML('<b>2</b>'))\n"
        "    sys.stdout.flush()\n    os.dup2(saved, 1)\n    caught = io.StringIO()\n"
        "    with contextlib.redirect_stdout(caught):\n        print('caught')\n        display(HTML('<b>3</b>'))\n"
        "    print('again')\n    file.seek(0)\n    return file.read(), caught.getvalue()\n"
        "print(launch(show, num_processes=1, start_method='fork').results)"
    )
    assert "((b'to the file\\n', 'caught\\n'),)" in cell.stdout
    shown = _shown_in_order(cell)
    assert [text for text in shown if "<b>" in text] == ["<b>1</b>", "<b>2</b>", "<b>3</b>"]
    assert shown.index("<b>3</b>") < shown.index("[rank 0] again")


def _need_tqdm(kernel: Kernel) -> None:
    if kernel.value("__import__('importlib.util', fromlist=['x']).find_spec('tqdm') is None"):
        pytest.skip("tqdm is not installed")


def test_nested_bars_take_one_line_each(kernel: Kernel) -> None:
    _need_tqdm(kernel)
    cell = kernel.check(
        "def bars():\n    from tqdm.auto import tqdm\n    for _ in tqdm(range(3), 'outer'):\n"
        "        for _ in tqdm(range(40), 'inner', leave=False):\n            time.sleep(0.01)\n"
        "launch(bars);"
    )
    lines = cell.stderr.splitlines()
    assert sum("outer: 100%" in line for line in lines) == 2
    assert len(lines) <= 4, "the only other line of a rank may be the first state of its outer bar"
    assert any(text.count("outer") == text.count("inner") == 2 for text in _drawings(cell))


def _is_drawing(output: dict[str, Any]) -> bool:
    shown = output["output_type"] in ("display_data", "update_display_data")
    return shown and output["transient"]["display_id"].endswith("-progress")


def _drawings(cell: Cell) -> list[str]:
    return [output["data"]["text/plain"] for output in cell.outputs if _is_drawing(output)]


def test_progress_bars_are_drawn_in_one_place(kernel: Kernel) -> None:
    cell = kernel.submit(
        "def bars():\n    for step in range(30):\n        sys.stderr.write(f'\\r{step:3d}/30'); sys.stderr.flush()\n"
        "        gate('bars') if step == 20 else time.sleep(0.01)\n    sys.stderr.write('\\n')\nlaunch(bars);"
    )
    kernel.wait_for(lambda: any(text.count(" 20/30") == 2 for text in _drawings(cell)))
    open_gate(kernel, "bars")
    kernel.finish(cell).expect_ok()
    drawings = _drawings(cell)
    assert cell.duration is not None
    assert 2 <= len(drawings) < 4 + 6 * cell.duration, "at most five updates per second"
    assert len({o["transient"]["display_id"] for o in cell.outputs if _is_drawing(o)}) == 1
    assert "[rank 0]  29/30" in cell.stderr
    assert cell.stderr.count("/30") == 2


def test_tqdm_bars_are_drawn(kernel: Kernel) -> None:
    _need_tqdm(kernel)
    kernel.check("from tqdm.auto import tqdm\ndef bars():\n    for _ in tqdm(range(20)):\n        time.sleep(0.03)")
    cell = kernel.check("launch(bars);")
    assert cell.stderr.count("20/20") == 2


@METHODS
def test_input_asks_in_the_cell(kernel: Kernel, answers: Answers, method: str) -> None:
    answers.waiting[:] = ["seven", "eight"]
    answers.asked.clear()
    cell = kernel.check(
        "def ask():\n    return input('number? ') if rank() == 1 else sys.stdin.readline()\n"
        f"launch(ask, start_method={method!r}).results",
    )
    assert sorted(answers.asked) == ["[rank 0] ", "[rank 1] number? "]
    assert cell.result_text in ("('seven\\n', 'eight')", "('eight\\n', 'seven')")


@METHODS
def test_getpass_asks_in_the_cell(kernel: Kernel, answers: Answers, method: str) -> None:
    answers.waiting[:] = ["secret"]
    cell = kernel.check(
        "import getpass\ndef ask():\n    return getpass.getpass('key: ') if rank() == 0 else ''\n"
        f"launch(ask, start_method={method!r}).results",
    )
    assert cell.result_text == "('secret', '')"


@METHODS
@pytest.mark.parametrize("call", ["breakpoint()", "import pdb; pdb.set_trace()"])
def test_a_breakpoint_prompts_in_the_cell(kernel: Kernel, answers: Answers, method: str, call: str) -> None:
    answers.waiting[:] = [*PAST_THE_CALL, "p secret + 1", "where", "c"]
    answers.asked.clear()
    cell = kernel.check(
        f"def debugged():\n    secret = 41\n    if rank() == 1:\n        {call}\n    return secret\n"
        f"launch(debugged, start_method={method!r}).results",
    )
    assert cell.result_text == "(41, 41)"
    assert len(answers.asked) == 3 + len(PAST_THE_CALL)
    assert all("rank 1" in prompt and re.search(r"\(Pdb\)|ipdb>", prompt) for prompt in answers.asked)
    assert "[rank 1] 42" in cell.stdout
    assert "return secret" in cell.plain


def test_quitting_the_debugger_ends_the_rank_not_the_kernel(kernel: Kernel, answers: Answers) -> None:
    answers.waiting[:] = ["q"]
    text = said(
        kernel.run("def debugged():\n    breakpoint()\n    return 1\nlaunch(debugged, num_processes=1, timeout=100)")
    )
    assert "the debugger of rank 0 was quit" in text
    assert kernel.check("1 + 1").result_text == "2"


def test_a_rank_may_die_while_the_cell_asks(kernel: Kernel, answers: Answers) -> None:
    answers.waiting[:] = ["late"]
    cell = kernel.run(
        "def ask():\n    if rank() == 1:\n        time.sleep(0.05)\n        os._exit(5)\n"
        "    return input('? ')\nlaunch(ask)",
    )
    assert not cell.ok, "the other rank may have its answer, but this one is dead"
    assert "rank 1 failed" in said(cell)
    assert "exit status 5" in said(cell)


def test_ten_thousand_lines_from_each_of_two_ranks_arrive(kernel: Kernel) -> None:
    kernel.check(
        "def talk():\n    for number in range(10_000):\n        print(f'line {number} of a rank that talks a lot')"
    )
    before = kernel.value("time.process_time()")
    kernel.check("launch(talk);")
    assert kernel.value("time.process_time()") - before < 5.0
    for rank in range(2):
        lines = kernel.value(f"notebook_accelerate.runs()[-1].logs({rank})")
        assert lines == [f"line {number} of a rank that talks a lot" for number in range(10_000)]


@pytest.mark.timeout(400)
def test_a_flood_of_100_megabytes_blocks_no_rank_and_does_not_grow_the_kernel(kernel: Kernel) -> None:
    kernel.check(
        "def flood():\n    line = 'x' * 99\n    for _ in range(500_000):\n        print(line)\n    return 'through'"
    )
    process = psutil.Process(kernel.pid)
    before, peak = process.memory_info().rss, 0
    cell = kernel.submit("launch(flood).results")
    begin = time.monotonic()
    while not cell.finished:
        kernel.pump(0.1)
        peak = max(peak, process.memory_info().rss)
        assert time.monotonic() - begin < 300
    assert cell.expect_ok().result_text == "('through', 'through')"
    assert peak - before < 200 << 20
    assert cell.duration is not None
    assert len(cell.stdout) <= HEAD_BYTES
    tail = [data["text/plain"] for data in cell.displays if "lines not shown" in str(data)][-1]
    left_out = int(tail.split()[1].replace(",", ""))
    assert left_out + tail.count("\n") + cell.stdout.count("] " + "x" * 99) == 2 * 500_000
    assert kernel.value("notebook_accelerate.runs()[-1].logs(0, tail=1)") == ["x" * 99]


def test_a_line_of_20_megabytes_arrives(kernel: Kernel) -> None:
    cell = kernel.check("launch(lambda: print('x' * 20_000_000), num_processes=1, start_method='fork').status")
    assert cell.result_text == "'succeeded'"


def test_output_in_any_encoding_arrives(kernel: Kernel) -> None:
    cell = kernel.check(
        "def talk():\n    print('ä ☃ 𝄞'); sys.stdout.buffer.write(b'\\xff\\xfe\\n'); print('\\udc80')\n"
        "launch(talk, num_processes=1, start_method='fork');"
    )
    assert "[rank 0] ä ☃ 𝄞\n" in cell.stdout
    assert "[rank 0] \\udc80\n" in cell.stdout


def test_captured_output_of_the_cell_includes_the_ranks(kernel: Kernel) -> None:
    cell = kernel.check(
        "import contextlib, io\nwith contextlib.redirect_stdout(io.StringIO()) as text:\n"
        "    launch(lambda: print('caught'))\nprint(text.getvalue().count('caught'))"
    )
    assert cell.stdout.splitlines()[-1] == "2"
    assert "] caught" not in cell.stdout


@METHODS
def test_a_rank_does_not_look_like_a_notebook(kernel: Kernel, method: str) -> None:
    code = (
        "def look():\n    import builtins, sys\n    from IPython import get_ipython\n    from tqdm.auto import tqdm\n"
        "    plain = 'ipykernel' not in sys.modules  # ipywidgets 7 imports it\n"
        "    from ipywidgets import IntSlider\n    from IPython.display import display\n"
        "    display(IntSlider(value=7)); list(tqdm(range(3)))\n"
        "    return [get_ipython() is None, not hasattr(sys, 'ps1'), plain, not hasattr(builtins, 'get_ipython')]\n"
    )
    kernel.check(code)
    cell = kernel.run(f"found = launch(look, start_method={method!r}, panel=False).results")
    assert kernel.value("found") == [[True] * 4] * 2
    shown = [data for data in cell.expect_ok().displays if "IntSlider(value=7)" in data["text/plain"]]
    assert [list(data) for data in shown] == [["text/plain"]] * 2, "a widget of a rank has no model in the kernel"


@METHODS
def test_exit_ends_the_rank(kernel: Kernel, method: str) -> None:
    kernel.check("def leave():\n    exit()\n    return 'never'")
    assert kernel.value(f"launch(leave, start_method={method!r}).results") == [None, None]


@METHODS
def test_cleared_displays_are_replaced(kernel: Kernel, method: str) -> None:
    cell = kernel.check(
        "def draw():\n    from IPython.display import HTML, clear_output, display\n"
        "    for step in range(3):\n        clear_output(wait=True)\n"
        "        display(HTML(f'<b>{rank()}: {step}</b>'))\n        print('line', step)\n"
        f"launch(draw, start_method={method!r}, panel=False);"
    )
    shown = [data["text/html"] for data in cell.displays if "<b>" in data.get("text/html", "")]
    assert sorted(shown) == ["<b>0: 2</b>", "<b>1: 2</b>"]
    assert "line" not in cell.stdout
    texts = [data.get("text/plain", "") for data in cell.displays]
    assert sorted(text for text in texts if "line" in text) == ["[rank 0] line 2", "[rank 1] line 2"]
    assert kernel.value("notebook_accelerate.runs()[-1].logs(rank=1)") == ["line 0", "line 1", "line 2"]


@METHODS
def test_shell_commands_of_a_function_run(kernel: Kernel, method: str) -> None:
    lines = "!echo $word; echo again"
    # IPython 7 on Python 3.12 does not transform this syntax.
    if not kernel.value("'getoutput' in get_ipython().transform_cell('lines = !ls')"):
        lines = "get_ipython().getoutput('echo $word; echo again')"
    kernel.check(
        f"def listing():\n    word = f'from rank {{rank()}}'\n    !echo said {{word}}\n    lines = {lines}\n"
        "    return list(lines)"
    )
    cell = kernel.check(f"found = launch(listing, start_method={method!r}).results")
    assert sorted(line for line in cell.stdout.splitlines() if "said" in line) == [
        "[rank 0] said from rank 0", "[rank 1] said from rank 1",
    ]  # fmt: skip
    assert kernel.value("found") == [["from rank 0", "again"], ["from rank 1", "again"]]


def test_output_after_clear_output_replaces_the_earlier_output(kernel: Kernel) -> None:
    cell = kernel.check(
        "def show():\n    from IPython.display import clear_output\n    print('a')\n    clear_output(wait=True)\n"
        "    print('b')\nlaunch(show, num_processes=1, start_method='fork');"
    )
    assert "[rank 0] a" in cell.stdout, "this line was shown before clear_output was called"
    assert [data["text/plain"] for data in cell.displays if "[rank 0]" in data.get("text/plain", "")] == ["[rank 0] b"]


def test_clear_output_without_waiting_clears_immediately(kernel: Kernel) -> None:
    cell = kernel.check(
        "def show():\n    from IPython.display import clear_output, display\n    clear_output()\n    print('a', 'b')\n"
        "    display('shown')\n    clear_output()\nlaunch(show, num_processes=1, start_method='fork', panel=False);"
    )
    assert all(text not in str(cell.displays) for text in ("a b", "shown"))
    long = kernel.check(
        "def show():\n    from IPython.display import clear_output\n    clear_output()\n"
        "    for line in range(2000):\n        print('line', line)\n"
        "launch(show, num_processes=1, start_method='fork', panel=False);"
    )
    assert "[rank 0] line 1999\n" in long.stdout
