"""Every flag that users of either family know parses, sets the right field, and unknown ones are refused."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

from weft.cli import VERBS, build_parser, main
from weft.cli.flags import _SAMPLING_FLAGS, SAMPLING_NAMES, engine_settings, sampling_params, sampling_settings
from weft.config import resolve
from weft.config.aliases import ALIASES
from weft.config.fields import OPTIONS
from weft.config.flag_names import with_flags
from weft.errors import RequestError

FLAGS = [
    ("--tp 2", {"tensor_parallel_size": 2}),
    ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
    ("--mem-fraction-static 0.8", {"gpu_memory_utilization": 0.8}),
    ("--gpu-memory-utilization 0.8", {"gpu_memory_utilization": 0.8}),
    ("--max-running-requests 63", {"max_num_seqs": 63}),
    ("--max-num-seqs 63", {"max_num_seqs": 63}),
    ("--chunked-prefill-size 130", {"max_num_batched_tokens": 130}),
    ("--max-num-batched-tokens 130", {"max_num_batched_tokens": 130}),
    ("--context-length 210", {"max_model_len": 210}),
    ("--max-model-len 210", {"max_model_len": 210}),
    ("--disable-cuda-graph", {"enforce_eager": True}),
    ("--enforce-eager", {"enforce_eager": True}),
    ("--cuda-graph-bs 1 2 8", {"cuda_graph_bs": [1, 2, 8]}),
    ("--cuda-graph-max-bs 8", {"cuda_graph_max_bs": 8}),
    ("--cuda-graph-mode FULL_AND_PIECEWISE", {"cuda_graph_mode": "FULL_AND_PIECEWISE"}),
    ("--enable-piecewise-cuda-graph", {"enable_piecewise_cuda_graph": True}),
    ("--piecewise-cuda-graph-tokens 16 64", {"piecewise_cuda_graph_tokens": [16, 64]}),
    ("--piecewise-cuda-graph-max-tokens 64", {"piecewise_cuda_graph_max_tokens": 64}),
    ("--piecewise-cuda-graph-compiler inductor", {"piecewise_cuda_graph_compiler": "inductor"}),
    ("--enable-torch-compile-debug-mode", {"enable_torch_compile_debug_mode": True}),
    ("--disable-radix-cache", {"enable_prefix_caching": False}),
    ("--no-enable-prefix-caching", {"enable_prefix_caching": False}),
    ("--mamba-scheduler-strategy extra_buffer", {"state_checkpoint_policy": "extra_buffer"}),
    ("--mamba-radix-cache-strategy no_buffer", {"state_checkpoint_policy": "no_buffer"}),
    ("--state-checkpoint-policy exact", {"state_checkpoint_policy": "exact"}),
    ("--mamba-ssm-dtype bfloat16", {"mamba_ssm_dtype": "bfloat16"}),
    ("--eviction-policy lru", {"eviction_policy": "lru"}),
    ("--piecewise-cuda-graph-tokens 1,2,4", {"piecewise_cuda_graph_tokens": [1, 2, 4]}),
    ("--cuda-graph-bs 1,2, 8", {"cuda_graph_bs": [1, 2, 8]}),
    ("--splitting-ops attention gdn", {"splitting_ops": ["attention", "gdn"]}),
    ("--splitting-ops +,gdn", {"splitting_ops": ["+", "gdn"]}),
    ('--speculative-config {"method":"ngram"}', {"speculative_config": {"method": "ngram"}}),
    ("--speculative-algorithm NEXTN", {"speculative_config": {"algorithm": "NEXTN"}}),
    (
        "--speculative-algorithm NGRAM --speculative-num-steps 3 --speculative-eagle-topk 1",
        {"speculative_config": {"algorithm": "NGRAM", "num_steps": 3, "eagle_topk": 1}},
    ),
    ("--speculative-num-draft-tokens 4", {"speculative_config": {"num_draft_tokens": 4}}),
    (
        "--speculative-ngram-min-match-window-size 2 --speculative-ngram-max-match-window-size 5",
        {"speculative_config": {"ngram_min_match_window_size": 2, "ngram_max_match_window_size": 5}},
    ),
    ("--trust-remote-code", {"trust_remote_code": True}),
    ("--enable-torch-compile", {"enable_torch_compile": True}),
    ("--torch-compile-max-bs 8", {"torch_compile_max_bs": 8}),
    ("--enable-cudagraph-gc", {"enable_cudagraph_gc": True}),
    ("--schedule-policy priority", {"schedule_policy": "priority"}),
    ("--load-format dummy", {"load_format": "dummy"}),
    ("--dtype bfloat16", {"dtype": "bfloat16"}),
    ("--seed 7", {"seed": 7}),
    ("--served-model-name m", {"served_model_name": "m"}),
    ("--profile traces", {"profile_dir": "traces"}),
]


@pytest.mark.parametrize(("flags", "settings"), FLAGS, ids=[flags.split()[0] for flags, _ in FLAGS])
def test_flag_sets_its_field(flags: str, settings: dict[str, object]) -> None:
    assert engine_settings(build_parser().parse(["config", *flags.split()])) == settings


def test_no_flag_no_setting() -> None:
    args = build_parser().parse(["generate", "hello"])
    assert engine_settings(args) == {} and sampling_settings(args) == {}


def test_every_alias_names_a_setting() -> None:
    assert {alias.field for alias in ALIASES.values()} <= set(OPTIONS)


@pytest.mark.parametrize("flag", ["--api-key", "--host", "--port"])
def test_flags_of_the_server_are_refused_by_name(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["generate", "hello", flag, "1"])
    assert f"{flag} is a setting of the HTTP server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["config", "--max-model-length", "5"], "unknown flag --max-model-length; did you mean --max-model-len"),
        (
            ["config", "--cpu-offload-gb", "3"],
            "--cpu-offload-gb is a flag of vLLM that Weft does not have: weights stay",
        ),
        (
            ["serve", "--block-size=32"],
            "--block-size is a flag of vLLM that Weft does not have: here it is called --page-",
        ),
        (["config", "--page-siz=5"], "unknown flag --page-siz; did you mean --page-size"),
        (["config", "--page-size", "many"], "invalid int value: 'many'"),
        (["config", "--cuda-graph-bs", "1,many"], "invalid int value: '1,many'"),
        (["serve", "--prot", "5"], "weft serve: error: unknown flag --prot; did you mean --port"),
        (["bench", "latency", "--btach"], "weft bench latency: error: unknown flag"),
        (["config", "stray"], "unexpected argument 'stray'; weft config takes flags only; a model is given by --model"),
        (["serve", "one", "--port", "1", "two"], "'two'; give one MODEL, before or after the flags"),
        (["generate", "one", "--quiet", "two"], "'two'; give every PROMPT in one place, before or after the flags"),
        (["sevre"], "unknown verb 'sevre'; did you mean serve?"),
        (["frobnicate"], "unknown verb 'frobnicate'; verbs: generate, chat, serve,"),
        ([], "VERB"),
    ],
)
def test_bad_command_lines(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    err = capsys.readouterr().err
    assert message in err and "Traceback" not in err


def test_a_refused_setting_is_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--tp", "7"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("weft: error: num_attention_heads=") and "--tensor-parallel-size 7" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--max-model-len 5000", "--max-model-len 5000: the checkpoint's positions end at"),
        ("--page-size 0", "--page-size 0 is out of range"),
        ("--dtype int", "--dtype int is not known"),
        ("--no-enable-prefix-caching --eviction-policy lru", "--eviction-policy lru has no effect with --no-enable-pr"),
        ("--torch-compile-max-bs 4", "--torch-compile-max-bs 4 has no effect without --enable-torch-compile;"),
        ("--temperature -1", "sampling parameters: --temperature -1.0 is outside the allowed range"),
        ("--min-tokens 9 --max-tokens 3", "--min-tokens 9 is greater than --max-tokens 3; lower one"),
    ],
)
def test_a_refusal_names_flags_before_weights_are_read(
    flags: str, message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.runner.model_runner.load_weights", lambda *_: pytest.fail("the weights are read"))
    assert main(["generate", "hello", "--device", "cpu", *flags.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--port 99999", "weft: error: --port 99999 is out of range"),
        ("--api-server-count 65", "weft: error: --api-server-count 65 is out of range"),
        ("--request-timeout 0", "weft: error: --request-timeout 0 is out of range"),
        ("--max-queue-size 0", "weft: error: --max-queue-size 0 is out of range"),
        ("--host 0.0.0.0", "weft: error: --host 0.0.0.0 lets other machines in"),
    ],
)
def test_a_refused_setting_of_the_server_is_named_as_its_flag(
    flags: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", *flags.split()]) == 2
    assert capsys.readouterr().err.startswith(message)


def test_only_settings_become_flags() -> None:
    message = "max_tokens=3 of config.json: dtype 'int8', model.norm, /data/page_size; num_kv_pages is too low"
    assert with_flags(message) == message.replace("num_kv_pages", "--num-kv-pages")


def test_trust_remote_code_is_taken_with_a_word(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    assert main(["config", "--json", "--device", "cpu", "--trust-remote-code"]) == 0
    assert "trust_remote_code" not in capsys.readouterr().out
    assert "trust_remote_code has no effect: the code of a checkpoint is never run" in caplog.text
    assert resolve(device="cpu", trust_remote_code=True) == resolve(device="cpu", trust_remote_code=False)


def test_sizes_in_the_help_are_whole_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "largest request body (default: 8,388,608)" in shown and "e+0" not in shown


def test_sampling_flags_are_sampling_parameters() -> None:
    assert set(_SAMPLING_FLAGS) <= set(SAMPLING_NAMES)
    argv = ["generate", "x", "--temperature", "0.5", "--top-k", "3", "--stop", "a", "--stop", "b"]
    argv += ["--no-skip-special-tokens", "--logit-bias", '{"5": 1.5}', "--bad-words", "no", "never"]
    params = sampling_params(sampling_settings(build_parser().parse(argv)))
    assert (params.temperature, params.top_k, params.stop, params.skip_special_tokens) == (0.5, 3, ["a", "b"], False)
    assert params.logit_bias == {5: 1.5} and params.bad_words == ["no", "never"]


@pytest.mark.parametrize("settings", [{"temperature": -1}, {"temprature": 1}, {"max_tokens": "5"}, {"stop": 5}])
def test_bad_sampling_parameters(settings: dict[str, object]) -> None:
    with pytest.raises(RequestError, match=next(iter(settings))):
        sampling_params(settings)


def test_help_is_quick_and_loads_no_torch() -> None:
    start = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    code = (
        "import sys, weft.cli\ntry: weft.cli.main(['generate', '--help'])\nfinally: assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--max-model-len" in done.stdout
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - start < 2.0


def test_the_list_of_verbs_loads_none_of_them() -> None:
    """Printing the list of verbs imports the parser, and nothing of the engine or of a verb."""
    code = (
        "import sys, weft.cli\ntry: weft.cli.main(['--help'])\n"
        "finally: print('LOADED', *(m for m in sys.modules if m[:4] in ('weft', 'msgs', 'asyn')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.rpartition("LOADED")[2].split())
    assert loaded == {"weft", "weft.cli", "weft.cli.parser", "weft.errors"}
    assert all(name in done.stdout for name in VERBS)


def test_a_verb_is_listed_with_the_words_of_its_parser() -> None:
    whole = build_parser().format_help()
    assert whole == build_parser("serve").format_help() == build_parser("").format_help()


@pytest.mark.parametrize("flag", ["--enable-hierarchical-cache", "--hicache-size=8", "--hicache-ratio=2"])
def test_flags_of_sglangs_tier_name_the_remedy(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["config", flag])
    assert "is a flag of SGLang that Weft does not have: " in (found := capsys.readouterr().err)
    assert "give --kv-offloading-size" in found
