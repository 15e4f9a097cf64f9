"""The package's output never contains credentials from URLs or the values of environment variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from notebook_accelerate import LaunchConfig, RayCluster
from notebook_accelerate.config.plain_values import format_setting, hide_credentials, is_secret_name, redact
from notebook_accelerate.launch.hosts.ray import ray_driver
from notebook_accelerate.widgets.config_panel import ConfigPanel
from notebook_accelerate.widgets.runs_table import RunsTable
from tests.support.runs import make_run

SECRET = "hunter2"
ADDRESS = f"ray://user:{SECRET}@head.example.org:10001"
RUNTIME = {
    "env_vars": {"TOKEN": SECRET},
    "pip": [f"git+https://user:{SECRET}@example.org/x.git", f"--index-url=https://example.org/?token={SECRET}"],
    "working_dir": f"https://{SECRET}@example.org/code.zip",
    "container": {"run_options": [f"--env=TOKEN={SECRET}"]},
}
CLUSTER = RayCluster(address=ADDRESS, runtime_env=RUNTIME)
CONFIGS = {
    "cluster": LaunchConfig(on=CLUSTER, num_processes=2),
    "address": LaunchConfig(on=ADDRESS, num_processes=2),
    "env": LaunchConfig(env={"TOKEN": SECRET}, num_processes=2),
    "notify": LaunchConfig(notify=f"https://example.org/{SECRET}", num_processes=2),
    "rendezvous": LaunchConfig(rdzv_conf={"secret": SECRET}, num_processes=2, num_nodes=2),
}


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ray://user:pass@host:10001", "ray://***@host:10001"),
        ("https://token@host/path", "https://***@host/path"),
        ("ray://user:p@ss/word@host:1", "ray://***@host:1"),
        ("https://host/path?a=1&access_token=abc&b=2#x", "https://host/path?a=1&access_token=***&b=2#x"),
        ("https://host/?X-Amz-Signature=abc", "https://host/?X-Amz-Signature=***"),
        ("https://host/?AWSAccessKeyId=abc&n=1&apikey=d", "https://host/?AWSAccessKeyId=***&n=1&apikey=***"),
        ("https://host/?max_tokens=3&tokenizer=a&key=b", "https://host/?max_tokens=3&tokenizer=a&key=***"),
        ("ray://host:10001", "ray://host:10001"),
        ("mail to a@b.org, see https://host/x", "mail to a@b.org, see https://host/x"),
        ("from 'ray://u:p@h:1' and 'ray://v:q@i:2'", "from 'ray://***@h:1' and 'ray://***@i:2'"),
    ],
)
def test_credentials_of_urls_are_hidden(text: str, shown: str) -> None:
    assert hide_credentials(text) == shown


@pytest.mark.parametrize(
    ("hidden", "names"),
    [
        (True, "token api_key openai_key wandb_key access_key accessToken apiKey APIKEY hfToken hftoken key secret"),
        (True, "OPENAI_API_KEY api_keys access_tokens db-password password2 userPwd client_secret credentials"),
        (True, "token_file aws_access_key_id X-Amz-Security-Token X-Amz-Credential passphrase"),
        (False, "tokenizer tokens max_tokens max_new_tokens pad_token pad_token_id eosToken token_type_ids"),
        (False, "key_frames keyframes num_key_value_heads key_dim metric_keys keys keyword sort_key loss_per_token lr"),
    ],
)
def test_the_name_of_a_variable_decides_whether_its_values_are_secrets(hidden: bool, names: str) -> None:
    assert [name for name in names.split() if is_secret_name(name) is not hidden] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_no_text_about_a_launch_shows_a_value(name: str) -> None:
    config = CONFIGS[name]
    run = make_run(2, **{key: value for key, value in config.non_default().items() if key != "num_processes"})
    texts = {
        "repr": repr(config),
        "cluster": repr(config.cluster),
        "setting": format_setting(config.on),
        "report": run.report().text + run.report().html + repr(run),
    }
    if config.num_nodes == 1:
        panel = ConfigPanel(config=config)
        texts["panel"] = panel.text + panel.html + panel.sentence + panel.widget.texts["cell"]
        texts["plan"] = repr(panel.plan) + panel.plan.sentence()
        panel.close()
    table = RunsTable([run, make_run(2)])
    texts["table"] = str(table.rows)
    table.close()
    assert [which for which, text in texts.items() if SECRET in text] == []
    if name in ("cluster", "env"):
        assert "TOKEN" in texts["repr"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LaunchConfig(env=[f"TOKEN={SECRET}"]),  # type: ignore[arg-type]
        lambda: LaunchConfig(env=f"TOKEN={SECRET}"),  # type: ignore[arg-type]
        lambda: LaunchConfig(env={"TOKEN": SECRET, "NUMBER": 3}),  # type: ignore[dict-item]
        lambda: LaunchConfig(env={"TOKEN": f"{SECRET}\0"}),
        lambda: LaunchConfig(rdzv_conf=f"secret={SECRET}"),  # type: ignore[arg-type]
        lambda: LaunchConfig(on=f"http://user:{SECRET}@host"),
        lambda: LaunchConfig(on=CLUSTER, num_nodes=2),
        lambda: LaunchConfig(on=ADDRESS, start_method="fork"),
        lambda: RayCluster(runtime_env=[f"TOKEN={SECRET}"]),  # type: ignore[arg-type]
        lambda: RayCluster(runtime_env={"env_vars": {"TOKEN": SECRET, "SET": {1}}}),
    ],
)
def test_errors_show_no_value(make: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match=r"\S") as caught:
        make()
    assert SECRET not in f"{caught.value} {caught.value.__cause__} {caught.value.__context__}"


def test_errors_of_a_form_show_no_value() -> None:
    panel = ConfigPanel(config=LaunchConfig())
    panel.launch_form.enter("env", f"A=1\n{SECRET}")
    assert panel.errors["env"] == "env: line 2 is not NAME=value; write one such line per entry"
    panel.close()


def test_texts_of_ray_are_redacted() -> None:
    error = ConnectionError(f"no route to {ADDRESS}: TOKEN={SECRET}")
    assert SECRET not in redact(ray_driver.unreachable(ADDRESS, error), CLUSTER)
    assert SECRET not in redact(f"could not install with TOKEN={SECRET}", CLUSTER)
    assert redact("nothing to hide", RayCluster()) == "nothing to hide"


def test_secrets_of_the_environment_are_redacted_but_not_its_words_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "true", "HF_TOKEN_PATH": "/home/me/token", "HF_TOKEN": "hf_a1b2c3d4"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    assert redact(" ".join(values.values()), RayCluster()) == "true /home/me/token ***"
