"""Scripts for vLLM with the import replaced: each runs, or ends in one sentence that names the remedy.

Each script makes the calls of one of vLLM's offline examples, in the same order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.whole import unless_long
from weft.assets import MODEL_DIR

HEAD = "PROMPTS = ['12 + 30 =', 'The capital of France is', '7 + 1 =']\n"

RUNS = {
    "basic": """
from weft import LLM, SamplingParams
sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
llm = LLM(model=MODEL, gpu_memory_utilization=0.9, swap_space=4, max_model_len=64)
for output in llm.generate(PROMPTS, sampling_params, lora_request=None):
    print(output.prompt, output.outputs[0].text)
""",
    "generate with flags": """
from weft import LLM, EngineArgs
from weft.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
EngineArgs.add_cli_args(parser)
parser.set_defaults(model=MODEL)
group = parser.add_argument_group('Sampling parameters')
group.add_argument('--max-tokens', type=int)
group.add_argument('--temperature', type=float)
args = vars(parser.parse_args(['--max_tokens', '5', '--max_model_len=64', '--seed', '3', '--no-enable-prefix-caching']))
max_tokens, temperature = args.pop('max_tokens'), args.pop('temperature')
llm = LLM(**args)
assert (llm.max_model_len, llm.config.seed, llm.config.enable_prefix_caching) == (64, 3, False)
sampling_params = llm.get_default_sampling_params()
if max_tokens is not None:
    sampling_params.max_tokens = max_tokens
assert all(len(o.outputs[0].token_ids) <= 5 for o in llm.generate(PROMPTS, sampling_params))
""",
    "chat with a template": """
from weft import LLM, SamplingParams
from weft.outputs import RequestOutput
llm = LLM(MODEL)
talk = [{'role': 'system', 'content': 'Be brief.'}, {'role': 'user', 'content': 'What is 12 + 30?'}]
params = SamplingParams(max_tokens=4, temperature=0)
plain = llm.chat(talk, params, use_tqdm=False, chat_template_content_format='auto')
template = "{% for message in messages %}[{{ message.role }}] {{ message.content }}\\n{% endfor %}"
for _ in range(2):
    outputs: list[RequestOutput] = llm.chat([talk] * 2, params, use_tqdm=False, chat_template=template)
    assert [o.prompt for o in outputs] == ['[system] Be brief.\\n[user] What is 12 + 30?\\n'] * 2, outputs[0].prompt
assert llm.chat(talk, params, use_tqdm=False)[0].prompt == plain[0].prompt != outputs[0].prompt
""",
    "chat with tools": """
import json
from weft import LLM
from weft.sampling_params import SamplingParams
llm = LLM(model=MODEL, max_model_len=512, tokenizer_mode='auto', config_format='auto', load_format='auto')
tool = {'type': 'function', 'function': {'name': 'now', 'description': 'the time', 'parameters': {'type': 'object'}}}
talk = [{'role': 'user', 'content': 'What time is it?'}]
outputs = llm.chat(talk, sampling_params=SamplingParams(max_tokens=8192, temperature=0.0), tools=[tool])
talk.append({'role': 'assistant', 'content': outputs[0].outputs[0].text.strip()})
llm.chat(talk, SamplingParams(max_tokens=3), tools=[tool])
""",
    "prefix caching": """
import time
from weft import LLM, SamplingParams
llm = LLM(model=MODEL, enable_prefix_caching=True)
params = SamplingParams(temperature=0, max_tokens=10)
table = 'One two three. ' * 40
first = llm.generate(table + PROMPTS[0], sampling_params=params)
again = llm.generate(table + PROMPTS[0], sampling_params=params)
assert again[0].num_cached_tokens > 0 and again[0].outputs[0].text == first[0].outputs[0].text
assert llm.reset_prefix_cache()
""",
    "engine step by step": """
import argparse
from weft import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from weft.utils import FlexibleArgumentParser
parser = EngineArgs.add_cli_args(FlexibleArgumentParser(description='demo'))
args: argparse.Namespace = parser.parse_args(['--model', MODEL])
engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
waiting = [(p, SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1, max_tokens=4)) for p in PROMPTS]
done, number = [], 0
while waiting or engine.has_unfinished_requests():
    if waiting:
        prompt, params = waiting.pop(0)
        engine.add_request(str(number), prompt, params, lora_request=None)
        number += 1
    done += [o for o in engine.step() if o.finished]
assert sorted(o.request_id for o in done) == ['0', '1', '2'] and engine.get_tokenizer() is not None
engine.add_request('gone', PROMPTS[0], SamplingParams())
engine.abort_request(['gone'])
assert not engine.has_unfinished_requests() and engine.reset_prefix_cache()
""",
    "typed prompts and many settings": """
from dataclasses import asdict
from weft import LLM, EngineArgs, SamplingParams, TextPrompt, TokensPrompt
from weft.inputs import PromptType
engine_args = EngineArgs(model=MODEL, max_model_len=256, max_num_seqs=2, limit_mm_per_prompt={'image': 1})
llm = LLM(**asdict(engine_args) | {'seed': 5})
assert (llm.config.seed, llm.config.max_num_seqs) == (5, 2)
prompts: list[PromptType] = [TokensPrompt(prompt_token_ids=[5, 6, 7]), TextPrompt(prompt='12 + 30 ='), {'prompt': 'a'}]
params = SamplingParams(n=2, temperature=0.8, max_tokens=3)
assert len(llm.generate(prompts, sampling_params=[params, params.clone(), params])[1].outputs) == 2
""",
    "structured outputs": """
from weft import LLM, SamplingParams
from weft.sampling_params import StructuredOutputsParams
llm = LLM(model=MODEL, max_model_len=100)
params = SamplingParams(structured_outputs=StructuredOutputsParams(choice=['Positive', 'Negative']))
assert llm.generate(prompts='Is this good?', sampling_params=params)[0].outputs[0].text in ('Positive', 'Negative')
""",
    "streaming": """
import asyncio
from weft.sampling_params import SamplingParams
from weft.engine.arg_utils import AsyncEngineArgs
from weft.sampling_params import RequestOutputKind
from weft.v1.engine.async_llm import AsyncLLM

async def ask(engine, request_id, kind):
    params = SamplingParams(max_tokens=12, temperature=0.8, top_p=0.95, seed=42, output_kind=kind, logprobs=0)
    found = []
    async for output in engine.generate(request_id=request_id, prompt=PROMPTS[0], sampling_params=params):
        found += output.outputs
        if output.finished:
            break
    return found

async def main():
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True))
    try:
        whole = (await ask(engine, 'a', RequestOutputKind.CUMULATIVE))[-1]
        news = await ask(engine, 'b', RequestOutputKind.DELTA)
        final, = await ask(engine, 'c', RequestOutputKind.FINAL_ONLY)
        assert len(news) > 1 and ''.join(c.text for c in news) == whole.text == final.text
        assert sum((c.token_ids for c in news), []) == whole.token_ids == final.token_ids
        assert [list(p) for c in news for p in c.logprobs] == [list(p) for p in whole.logprobs]
    finally:
        engine.shutdown()

asyncio.run(main())
""",
    "asyncio engine": """
import asyncio
from weft import AsyncEngineArgs, AsyncLLMEngine, SamplingParams

async def main():
    engine = AsyncLLMEngine.from_engine_args(AsyncEngineArgs(model=MODEL, max_model_len=64))
    async for result in engine.generate(PROMPTS[0], SamplingParams(temperature=0.8, top_p=0.95), 'id'):
        final = result
    assert final.finished and final.request_id == 'id'
    await engine.shutdown()

asyncio.run(main())
""",
    "settings that change nothing": """
from weft import LLM, SamplingParams
llm = LLM(model=MODEL, max_model_len=64, trust_remote_code=True, disable_log_stats=False, enable_chunked_prefill=True,
          enforce_eager=True, gpu_memory_utilization=0.4, disable_custom_all_reduce=True, enable_lora=False,
          tensor_parallel_size=1)
params = SamplingParams(temperature=0, max_tokens=3)
assert llm.generate([{'prompt_token_ids': [1, 2]}], params, use_tqdm=False)[0].finished
""",
}

ENDS: dict[str, tuple[str, str]] = {
    "embed": ("from weft import LLM\nLLM(model=MODEL, runner='pooling')", "runner='pooling'.*models generate"),
    "classify": ("from weft import LLM\nLLM(MODEL).classify(PROMPTS)", "LLM.classify: .*use another engine"),
    "pooling parameters": ("from weft import LLM, PoolingParams", "PoolingParams is vLLM's.*use another engine"),
    "pooling outputs": ("from weft.outputs import PoolingRequestOutput", "PoolingRequestOutput is vLLM's.*use another"),
    "lora": ("from weft import LLM\nfrom weft.lora.request import LoRARequest", "LoRA is not supported; merge"),
    "lora request": (
        "from weft import LLM\nLLM(MODEL).generate(PROMPTS, lora_request=object())",
        "lora_request is given, but LoRA is not supported; merge",
    ),
    "lora in an engine": ("from weft import LLM\nLLM(model=MODEL, enable_lora=True, max_loras=1)", "merge the adapter"),
    "beam search": ("from weft.sampling_params import BeamSearchParams", "BeamSearchParams is vLLM's.*use n with"),
    "guided decoding": ("from weft.sampling_params import GuidedDecodingParams", "use StructuredOutputsParams"),
    "freeing memory": (
        "from weft.distributed import cleanup_dist_env_and_memory",
        "weft.distributed is a module of vLLM.*call LLM.shutdown",
    ),
    "metrics": ("from weft.v1.metrics.reader import Counter", "weft.v1.metrics is a module of vLLM.*stats"),
    "metrics of an engine": ("from weft import LLM\nLLM(MODEL).get_metrics()", r"LLM.get_metrics: use stats\(\)"),
    "workers": ("from weft import LLM\nLLM(MODEL).collective_rpc('f')", "LLM.collective_rpc: .*use update_weights"),
    "model of an engine": ("from weft import LLM\nLLM(MODEL).apply_model(print)", "LLM.apply_model: .*update_weights"),
    "inner engine": ("from weft import LLM\nLLM(MODEL).llm_engine.step()", "LLM.llm_engine: use add_request"),
    "renderer": ("from weft import LLM\nLLM(MODEL).renderer", r"LLM.renderer: use render_chat\(\)"),
    "profiling": ("from weft import LLM\nLLM(MODEL).start_profile()", "LLM.start_profile: give profile_dir"),
    "logits processors of an engine": (
        "from weft.v1.sample.logits_processor import LogitsProcessor", r"SamplingParams\(logits_processors=\[...\]\)",
    ),
    "a draft model": (
        "from weft import LLM\nLLM(model=MODEL, speculative_config={'method': 'eagle', 'num_speculative_tokens': 2})",
        "'eagle'.*(mtp|ngram)",
    ),
    "transfer of caches": ("from weft.config import KVTransferConfig", "KVTransferConfig is vLLM's.*use data_parallel"),
    "compilation": ("from weft.config import CompilationConfig", "CompilationConfig is vLLM's.*cuda_graph_mode"),
    "models": ("from weft import ModelRegistry", "ModelRegistry is vLLM's.*adding-a-model"),
    "model code": ("from weft.model_executor.models.llama import LlamaForCausalLM", "weft.model_executor is a module"),
    "pictures": ("from weft.assets.image import ImageAsset", "weft.assets.image is a module of vLLM.*PIL"),
    "platforms": ("from weft.platforms.interface import Platform", "weft.platforms.interface is a module of vLLM"),
    "embeddings as prompts": (
        "from weft import LLM\nLLM(MODEL).generate({'prompt_embeds': [[0.0]]})", "unknown keys.*prompt_embeds.*allowed",
    ),
    "other words for content": (
        "from weft import LLM\nLLM(MODEL).chat([{'role': 'user'}], chat_template_content_format='string')",
        "chat_template_content_format='string' is not supported.*use auto",
    ),
    "a wrong setting": ("from weft import EngineArgs\nEngineArgs(MODEL, max_modl_len=3)", "did you mean max_model"),
    "a wrong field": (
        "from weft import SamplingParams\nSamplingParams().max_token = 3", "no parameter 'max_token'.*max_tokens",
    ),
    "a field out of range": (
        "from weft import SamplingParams\nSamplingParams().max_tokens = 0", "max_tokens=0 is outside the allowed range",
    ),
    "pausing": (
        "import asyncio\nfrom weft import AsyncLLM\nasync def main():\n    await AsyncLLM(MODEL).add_lora(None)\n"
        "asyncio.run(main())",
        r"AsyncLLM.add_lora: LoRA is not supported",
    ),
    "a chat template of an engine": ("from weft import LLM\nLLM(model=MODEL, chat_template='x')", "copy of the folder"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def forgets_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith(("weft.v1", "weft.utils", "weft.inputs", "weft.entrypoints")):
            del sys.modules[name]


def run(script: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["script.py"])
    scope: dict[str, Any] = {"__name__": "__main__", "MODEL": str(MODEL_DIR)}
    exec(compile(HEAD + script, "script.py", "exec", dont_inherit=True), scope)
    for value in scope.values():
        if type(value).__name__ in ("LLM", "LLMEngine"):
            value.shutdown()


ASYNCIO = ("asyncio engine", "streaming")
"""Scripts with an engine in a process of its own, as ``tests/engine/test_async_llm.py`` has."""


@pytest.mark.parametrize("name", unless_long([name for name in RUNS if name not in ASYNCIO], RUNS))
def test_a_script_runs(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run(RUNS[name], monkeypatch, tmp_path)


@pytest.mark.parametrize("name", ENDS)
def test_a_script_ends_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script, sentence = ENDS[name]
    with pytest.raises(Exception, match=sentence) as raised:
        run(script, monkeypatch, tmp_path)
    assert "\n" not in str(raised.value)
