"""The chat template of a checkpoint: from a conversation to its text.

Job: check the variables of the template, and run it. Owns: the compiled template. Does not know: token ids, engines.

A template is a program in the checkpoint. transformers compiles the template for a sandbox and prepares its variables.
A conversation of plain JSON needs no preparation, so it goes straight to the compiled template. The call then
takes half the time of transformers' own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.errors import ConfigError, RequestError

_ARGUMENTS = frozenset(
    "add_generation_prompt chat_template continue_final_message conversation max_length messages padding "
    "return_assistant_tokens_mask return_dict return_tensors sanitize_control_tokens tokenize tokenizer_kwargs tools "
    "truncation".split()
)

_UNPREPARED = frozenset({"role", "content", "name", "tool_calls", "tool_call_id"})
"""Message fields that transformers passes to the template unchanged."""


@dataclass(frozen=True, slots=True)
class TemplateOptions:
    """How a conversation is rendered.

    Attributes:
        tools: JSON-schema function descriptions.
        chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
        add_generation_prompt: end with the header of an assistant turn.
        continue_final_message: leave the last message open, to be continued.
    """

    tools: Sequence[Mapping[str, Any]] | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False


DEFAULT_OPTIONS = TemplateOptions()


class ChatTemplate:
    """The template of one transformers tokenizer."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self._hf = hf_tokenizer
        self._compiled: _Compiled | None = None
        self._compiled_text: str | None = None

    @property
    def text(self) -> str | None:
        """The only template of the checkpoint; None if it has no template, or several named ones."""
        template = self._hf.chat_template
        return template if isinstance(template, str) else None

    @property
    def exists(self) -> bool:
        return self._hf.chat_template is not None

    def compile(self) -> None:
        """Compile the template now, which takes 20 ms, instead of at its first use. Raises ConfigError."""
        from jinja2 import TemplateError

        text = self.text
        if text is not self._compiled_text:
            try:
                self._compiled = None if text is None else _Compiled(text, self._hf.special_tokens_map)
            except TemplateError as error:
                raise ConfigError(
                    f"the checkpoint's chat template is not a valid template ({error}); fetch its files again"
                ) from error
            self._compiled_text = text

    def render(self, messages: Sequence[Mapping[str, Any]], options: TemplateOptions = DEFAULT_OPTIONS) -> str:
        """Render a conversation with the chat template. Encode the result with ``add_special_tokens=False``.

        Args:
            messages: dicts with ``role``, ``content`` and whatever else the template reads.

        Raises:
            RequestError: there is no template, there are no messages, or the template refuses them.
        """
        tools, continues, adds = options.tools, options.continue_final_message, options.add_generation_prompt
        variables = dict(options.chat_template_kwargs or {})
        self._check(messages, variables, adds, continues)
        try:
            self.compile()
            if self._compiled is not None and not continues and _is_prepared(messages, tools, variables):
                return self._compiled.render(messages, tools, adds, variables)
            return self._hf.apply_chat_template(
                [dict(message) for message in messages],
                tools=[dict(tool) for tool in tools] if tools else None,
                tokenize=False,
                add_generation_prompt=adds,
                continue_final_message=continues,
                **variables,
            )
        except Exception as error:  # a template can raise any exception
            first_line = next(iter(str(error).splitlines()), "no message")
            raise RequestError(f"the chat template refuses these messages: {first_line}", "messages") from error

    def _check(
        self, messages: Sequence[Mapping[str, Any]], variables: dict[str, Any], add_prompt: bool, continue_final: bool
    ) -> None:
        if not self.exists:
            raise RequestError(
                "this checkpoint has no chat template, which messages need; give a prompt instead (generate() or "
                "/v1/completions), or add a chat_template.jinja to a copy of its folder",
                "messages",
            )
        if not messages:
            raise RequestError("messages is empty; a chat needs at least one message", "messages")
        if any(not isinstance(message, Mapping) or "role" not in message for message in messages):
            raise RequestError("every message must be a dict with at least a 'role'", "messages")
        if add_prompt and continue_final:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other; set one of them to False",
                "continue_final_message",
            )
        reserved = sorted(_ARGUMENTS.intersection(variables)) if variables else None
        if reserved:
            raise RequestError(
                f"chat_template_kwargs holds {', '.join(reserved)}, not variables of a template; leave them out",
                "chat_template_kwargs",
            )


class _Compiled:
    """A template in transformers' sandbox with two shortcuts. A missing attribute of a dict raises no exception, and
    whether an attribute is safe is decided once per type."""

    def __init__(self, text: str, special_tokens: Mapping[str, Any]) -> None:
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from transformers.utils.chat_template_utils import _compile_jinja_template

        judged: dict[tuple[type, str], bool] = {}

        class Environment(ImmutableSandboxedEnvironment):
            def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
                is_safe = judged.get((type(obj), attr))
                if is_safe is None:
                    is_safe = super().is_safe_attribute(obj, attr, value)
                    if len(judged) < _MAX_JUDGED:  # a conversation may bring names of its own
                        judged[type(obj), attr] = is_safe
                return is_safe

            def getattr(self, obj: Any, attribute: str) -> Any:
                if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
                    return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
                return super().getattr(obj, attribute)

        sandbox = object.__new__(Environment)
        sandbox.__dict__.update(_compile_jinja_template(text).environment.__dict__)
        self._template = sandbox.from_string(text)
        self._template.globals = dict(self._template.globals)  # Jinja's chain of dicts is slow to read
        self._always: dict[str, Any] = {**special_tokens, "documents": None}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        given = {"messages": messages, "tools": tools or None, "add_generation_prompt": add_generation_prompt}
        text: str = self._template.render({**self._always, **given, **variables})
        return text


_DICT_ATTRIBUTES = frozenset(dir(dict))
_MAX_JUDGED = 1000


def _is_prepared(messages: Any, tools: Any, variables: Mapping[str, Any]) -> bool:
    """Whether transformers would pass the value to the template unchanged."""
    return (
        type(messages) is list
        and all(type(m) is dict and m.keys() <= _UNPREPARED and None not in m.values() for m in messages)
        and _is_plain(messages)
        and _is_plain(tools)
        and _is_plain(variables)
    )


def _is_plain(value: Any) -> bool:
    """Whether the value is JSON of the exact built-in types. A subclass could have methods that a template must not
    reach."""
    kind = type(value)
    if kind is str or value is None or kind is bool or kind is int or kind is float:
        return True
    if kind is list:
        return all(map(_is_plain, value))
    return kind is dict and all(type(key) is str for key in value) and all(map(_is_plain, value.values()))
