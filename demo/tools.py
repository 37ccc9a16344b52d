"""Chats in which functions are called, and answers that are JSON objects.

Owns how chats are made of the functions and objects of `functions`: who offers what under which names, what is asked,
called, returned and answered, and the evaluation's rows. Knows nothing of tokens; the markup of calls is the chat
template's. A message with `given` is context: nothing of it is learned.
"""

import json
from random import Random
from typing import NamedTuple

from demo import about, functions, lexicon, rewording, words
from demo.functions import RECORDS, TOOLS, Record, Tool

NO_TOOL = "Sorry, I have no tool for that."
INVENTED = 0.2  # share of names of functions, parameters and keys that are invented
EXTRACTION, FINAL = 0.25, 0.12  # shares of chats in which an object is asked for as a call, or the answer is one
TYPES = {"n": "integer", "k": "integer", "r": "integer", "price": "number", "flag": "boolean", "list": "array", "names": "array"}
CHOICES = {
    "colour": functions.COLOURS, "sky": functions.SKIES, "mood": list(functions.GOOD), "language": functions.LANGUAGES,
    "room": functions.ROOMS, "day": functions.DAYS,
}  # fmt: skip
FINAL_ANSWER = Tool(
    "final_answer", "Provides a final answer to the given problem.", (("answer", "text"),), "", "", ""
)  # fmt: skip
OBJECT_ASKS = [
    "{text} Give this as JSON with the keys {keys}.",
    "Return a JSON object with the keys {keys}: {text}",
    "{text} Answer in JSON, keys {keys}.",
    "Read this and return JSON for the schema {schema}\n{text}",
    "{text}\nReply with a JSON object of this schema: {schema}",
    "Extract {keys} as JSON.\n\n{text}",
    "Give me an object of the following json_schema:\n\n{schema}\n\n{text}",
    "Text: {text}\nSchema: {schema}\nJSON:",
    "Turn this into a JSON object ({keys}): {text}",
    "Which {keys} are named here? Answer with JSON only. {text}",
    "```json\n{schema}\n```\nFill the schema from this text: {text}",
]
EXTRACT_ASKS = ["{text}"] * 6 + [
    "Extract: {text}", "Extract the {name} from this: {text}", "Read this: {text}", "{text} Extract the {name}.", "Parse this text: {text}",
    "Get the {name} details.\n\n{text}", "Here is a text: {text}", "Extract the data from the following sentence: {text}",
]  # fmt: skip
POLITE = [
    "Could you {ask}?", "Can you {ask}?", "Please {ask}.", "Would you {ask}?", "I want you to {ask}.", "I need you to {ask}.", "Can you please {ask}?",
]  # fmt: skip
TERSE = [
    "{name} {values}", "{name}: {values}", "{values}, {name}", "{does}: {values}", "{does} {pairs}.", "Call {name} with {pairs}.", "Use {name}, {pairs}.",
    "{name}({pairs})", "I need {name} for {values}.", "Run {name} for {values}, please.",
]  # fmt: skip
ENDINGS = [" Thanks.", " Thank you!", " please", ", please.", " now.", " for me.", " right away.", " if you can."]
GREETINGS = ["Hi,", "Hey!", "Hello.", "OK.", "One more thing:", "Good morning!", "Quick question:", "Now:"]
IMPERATIVES = frozenset(
    "Tell Send Write Let Set Start Give Book Reserve Find Use Call Add Put Search Look Schedule Plan Make Turn Heat Play Show Order Buy Get Translate "
    "Save Remember Delete Remove Erase Read Open Convert Change Multiply Check Mail Text Message".split()
)
SYSTEM = (
    "You are a helpful assistant.|You are a helpful agent.|You are an expert assistant.|You answer with tool calls.|Use the tools to answer the question.|"
    "Always be polite and short.|You can call functions to solve the task.|Think about which function fits.|Never invent values.|If no tool fits, say so.|"
    "Call one tool at a time.|Your answers are short.|You solve tasks step by step.|The user is a customer.|Only use the tools that you are given.|"
    "You help with daily tasks.|Do not repeat a call with the same arguments.|When you are done, answer the user.|You are an agent that extracts data.|"
    "Return the right arguments.|Today is a sunny day.|To do so, you have been given access to some tools.|Arguments must be values, not names of variables.|"
    "Your task is to understand the text and return the fields.|You never say more than needed.|Now begin!"
).split("|")


def slots(rng: Random) -> dict[str, str | int]:
    """One filling for every slot of a wording; numbers are numbers."""
    city, city2 = (_place(rng) for _ in range(2))
    n, k, r = rng.randint(2, 99), rng.randint(2, 99), rng.randint(11, 59)
    things = [_thing(rng) for _ in range(rng.choice((2, 2, 3)))]
    people = [_person(rng) for _ in range(rng.choice((2, 2, 3)))]
    money, money2 = rng.sample(functions.MONIES, 2)
    mood, person = rng.choice(list(functions.GOOD)), _person(rng)
    filling = {"item": _thing(rng), "city": city, "city2": city2, "person": person, "say": _said(rng)}
    filling["phrase"] = " ".join(_thing(rng) for _ in range(rng.choice((1, 1, 2, 3))))
    filling |= {"n": n, "k": k, "r": r, "r2": r, "h": rng.randint(1, 23), "sum": n + k, "product": n * k}
    filling |= {"list": _listed(things), "names": _listed(people), "money": money, "money2": money2, "mood": mood}
    filling |= {"sky": rng.choice(functions.SKIES), "colour": rng.choice(functions.COLOURS), "room": rng.choice(functions.ROOMS)}
    filling |= {"day": rng.choice(functions.DAYS), "event": rng.choice(functions.EVENTS), "language": rng.choice(functions.LANGUAGES)}
    filling |= {"file": rng.choice(functions.NAMES_OF_FILES), "good": rng.choice(functions.GOOD[mood]), "feel": rng.choice(functions.FEEL[mood])}
    filling |= {"mail": f"{'.'.join(person.lower().split())}@{words.invented(rng)}.{rng.choice(('com', 'org', 'net'))}", "price": rng.randint(11, 199) / 2}
    return filling | {"not": rng.choice(("", "not ")), "": json.dumps([things, people])}


def value(filling: dict, slot: str) -> str | int | float | bool | list[str]:
    """Return the value of a slot in an argument or object."""
    if slot in ("list", "names"):
        return json.loads(filling[""])[slot == "names"]
    return filling["not"] == "" if slot == "flag" else filling[slot]


def _place(rng: Random) -> str:
    return rewording.noun(rng).capitalize() if rng.random() < 0.5 else rng.choice(functions.CITIES)


def _thing(rng: Random) -> str:
    """A thing: mostly one that must be copied letter by letter."""
    noun = rewording.noun(rng)
    if (kind := rng.random()) < 0.2:
        return f"{rng.choice((*words.COLOURS, rewording.noun(rng)))} {noun}"
    return words.plural(noun) if kind < 0.4 else noun


def _person(rng: Random) -> str:
    kind = rng.random()
    name = rng.choice(functions.PEOPLE) if kind < 0.4 else rewording.noun(rng).capitalize() if kind < 0.75 else lexicon.person(rng)
    return f"{name} {rewording.noun(rng).capitalize()}" if rng.random() < 0.15 else name


def _said(rng: Random) -> str:
    """Return a text said to somebody: one of a few fixed sentences, or a text of random words."""
    noun, other, name = rewording.noun(rng), rewording.noun(rng), _person(rng)
    told = f"the {noun} is {rng.choice(words.COLOURS)}|I have a {noun}|we meet at the {noun}|{name} has {rng.randint(2, 99)} {words.plural(noun)}"
    told += f"|you need the {noun} and the {other}|{name} is in the {noun}|it is in the {noun}|I will bring the {noun}|{noun} {other}|the {noun} has a {other}"
    return rng.choice(functions.SENTENCES) if rng.random() < 0.25 else rng.choice(told.split("|"))


def _listed(parts: list[str]) -> str:
    return ", ".join(parts[:-1]) + " and " + parts[-1]


def _wording(variants: str, rng: Random, held_out: bool) -> str:
    """One of the wordings; the last is kept for the evaluation."""
    *trained, kept = variants.split("|")
    if held_out:
        return kept
    chosen = rng.choice(trained)
    if rng.random() < 0.1:
        chosen = chosen.rstrip(".") + rng.choice(ENDINGS)
    if (kind := rng.random()) < 0.25 and chosen.split(" ")[0] in IMPERATIVES and chosen.count(".") == 1:
        return rng.choice(POLITE).replace("{ask}", chosen[0].lower() + chosen[1:].rstrip("."))
    if kind > 0.9:
        return f"{rng.choice(GREETINGS)} {chosen}"
    return chosen[0].lower() + chosen[1:].rstrip(".?") if kind > 0.82 and chosen[1:2].islower() else chosen


def _terse(offered: "Offered", filling: dict, rng: Random) -> str:
    """A function asked for by its name or description and its values: no wording of its own to be known by."""
    given = [(name.replace("_", " "), str(filling[slot])) for name, slot in offered.parameters]
    texts = {"values": " ".join(value for _, value in given), "pairs": _listed([" ".join(pair) for pair in given]) if len(given) > 1 else " ".join(given[0])}
    name = offered.name if rng.random() < 0.3 else offered.name.replace("_", " ").removeprefix("get ")
    return rng.choice(TERSE).format(name=name, does=offered.tool.does.rstrip("."), **texts)


def _told(record: Record, rng: Random, held_out: bool) -> str:
    """One of an object's sentences; the last is kept for the evaluation."""
    *trained, kept = record.texts.split("|")
    return kept if held_out else rng.choice(trained)


def _name(variants: str, rng: Random, invented: bool | None) -> str:
    """A name for a function, a parameter or a key; None: one that is invented now and then."""
    if invented or (invented is None and rng.random() < INVENTED):
        return "_".join(words.invented(rng) for _ in range(rng.choice((1, 2))))
    return rng.choice(variants.split("|"))


def _key(variants: str, slot: str, rng: Random, invented: bool | None) -> str:
    """Only numbers go under invented keys: of two texts nothing would say which is which."""
    return _name(variants, rng, invented) if slot == "n" else rng.choice(variants.split("|"))


class Offered(NamedTuple):
    """A function as one chat offers it: the chosen names, and the form of its schema."""

    tool: Tool
    name: str
    parameters: tuple[tuple[str, str], ...]
    titled: bool
    enums: bool

    @property
    def schema(self) -> dict:
        parameters = object_schema(self.parameters, self.name if self.titled else "", self.enums)
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.tool.does, "parameters": parameters},
        }

    def call(self, filling: dict) -> dict:
        arguments = {name: value(filling, slot) for name, slot in self.parameters}
        return {"type": "function", "function": {"name": self.name, "arguments": arguments}}


def object_schema(parameters: tuple[tuple[str, str], ...], title: str = "", enums: bool = False) -> dict:
    """The JSON schema of an object; with a `title`, as pydantic writes it."""
    kinds = {}
    for name, slot in parameters:
        kind: dict = {"title": name.replace("_", " ").title()} if title else {}
        kind["type"] = TYPES.get(slot, "string")
        if kind["type"] == "array":
            kind["items"] = {"type": "string"}
        if enums and slot in CHOICES:
            kind["enum"] = CHOICES[slot]
        kinds[name] = kind
    schema = {"type": "object", "properties": kinds, "required": list(kinds)}
    return {**({"title": title} if title else {}), **schema, **({"additionalProperties": False} if title else {})}


def offer(tool: Tool, rng: Random, invented: bool | None = None) -> Offered:
    names: list[str] = []
    while len(set(names)) < 1 + len(tool.parameters):  # an invented name may come twice
        names = [_name(variants, rng, invented) for variants in (tool.names, *(p[0] for p in tool.parameters))]
    slots_of = [slot for _, slot in tool.parameters]
    titled, enums = rng.random() < 0.3, rng.random() < 0.4
    return Offered(tool, names[0], tuple(zip(names[1:], slots_of, strict=True)), titled, enums)


def exchange(offered: list[Offered], rng: Random, held_out: bool = False) -> list[dict]:
    """Return a question for one of the functions, one or two calls, their results, and the answer."""
    chosen = rng.choice(offered)
    fillings = [slots(rng) for _ in range(2 if rng.random() < 0.12 else 1)]
    terse = not held_out and rng.random() < 0.15
    asks = [
        _terse(chosen, filling, rng) if terse else _wording(chosen.tool.asks, rng, held_out).format(**filling)
        for filling in fillings
    ]
    results = [{"role": "tool", "content": chosen.tool.result.format(**filling)} for filling in fillings]
    answer = " ".join(chosen.tool.answer.format(**filling) for filling in fillings)
    calls = {"role": "assistant", "content": "", "tool_calls": [chosen.call(filling) for filling in fillings]}
    return [{"role": "user", "content": " ".join(asks)}, calls, *results, {"role": "assistant", "content": answer}]


def chat(rng: Random, turns: int) -> tuple[list[dict], list[dict]]:
    """Messages and tools of a training chat of about `turns` messages by the user."""
    kind = rng.random()
    if kind < EXTRACTION:
        messages, schemas = _extraction(rng, turns)
    elif kind < EXTRACTION + FINAL:
        messages, schemas = _with_final_answer(rng, turns)
    else:
        messages, schemas = _plain(rng, turns)
    if rng.random() < 0.5:
        text = " ".join(rng.sample(SYSTEM, rng.choice((1, 1, 2, 3, 6))))
        messages = [{"role": "system", "content": text}, *messages]
    return messages, schemas


def _plain(rng: Random, turns: int) -> tuple[list[dict], list[dict]]:
    """Calls, and questions that need none or that no function answers."""
    picked = rng.sample(TOOLS, rng.choice((1, 1, 2, 3)))
    offered, missing = [offer(tool, rng) for tool in picked], [t for t in TOOLS if t not in picked]
    messages: list[dict] = []
    for _ in range(rng.randint(1, max(1, turns // 3))):
        if (kind := rng.random()) < 0.86:
            messages += exchange(offered, rng)
            continue
        question, answer = about.draw(rng), NO_TOOL
        text = question[0] if kind < 0.94 else _wording(rng.choice(missing).asks, rng, False).format(**slots(rng))
        messages += [{"role": "user", "content": text}]
        messages += [{"role": "assistant", "content": question[1] if kind < 0.94 else answer}]
    return messages, [each.schema for each in offered]


def _extraction(rng: Random, turns: int) -> tuple[list[dict], list[dict]]:
    """An object is asked for as the call of a function that has the object's name, as instructor does it."""
    record = rng.choice(RECORDS)
    tool = Tool(
        rng.choice(("User|Person|Item|Record", "Entry|Data|Result|Info", "Details|Extract|Response")),
        rng.choice(("Correctly extracted the object with all the required parameters with correct types", "", "The fields of the text.")),
        record.keys, "", "", "",
    )  # fmt: skip
    offered, messages = offer(tool, rng, False), []
    for _ in range(rng.randint(1, max(1, turns // 4))):
        filling = slots(rng)
        text = _told(record, rng, False).format(**filling)
        ask = rng.choice(EXTRACT_ASKS).format(text=text, name=offered.name)
        messages += [{"role": "user", "content": ask}, {"role": "assistant", "content": "", "tool_calls": [offered.call(filling)]}]
        messages += [{"role": "tool", "content": "ok"}, {"role": "assistant", "content": "Done."}]
    return messages[:-2], [offered.schema]


def _with_final_answer(rng: Random, turns: int) -> tuple[list[dict], list[dict]]:
    """The answer is a call too, and results come as observations, as smolagents has it."""
    offered = [offer(tool, rng) for tool in rng.sample(TOOLS, rng.choice((1, 1, 2)))]
    final = Offered(FINAL_ANSWER, "final_answer", (("answer", "text"),), False, False)
    messages: list[dict] = []
    for _ in range(rng.randint(1, max(1, turns // 5))):
        question, call, *results, answer = exchange(offered, rng)
        question["content"] = rng.choice(("New task:\n", "", "Task: ")) + question["content"]
        closing = {"role": "assistant", "content": "", "tool_calls": [final.call({"text": answer["content"]})]}
        if rng.random() < 0.5:
            text = "Calling tools:\n" + str([{"id": f"call_{i}", **c} for i, c in enumerate(call["tool_calls"])])
            seen = "\n".join("Observation:\n" + result["content"] for result in results)
            results = [{"role": "assistant", "content": text, "given": True}, {"role": "user", "content": seen}]
            messages += [question, *results, closing] if rng.random() < 0.5 else [question, call]
        else:
            messages += [question, call, *results, closing]
        if messages[-1] is call:
            break
    return messages, [*(each.schema for each in offered), final.schema]


def json_answer(rng: Random, held_out: bool = False, invented: bool | None = None) -> tuple[str, str]:
    """A question for an object, and the object; now and then for a list of them."""
    record = rng.choice(RECORDS)
    keys: list[str] = []
    while len(set(keys)) < len(record.keys):
        keys = [_key(variants, slot, rng, invented) for variants, slot in record.keys]
    parameters = tuple((key, slot) for key, (_, slot) in zip(keys, record.keys, strict=True))
    fillings = [slots(rng) for _ in range(rng.choice((2, 3)) if not held_out and rng.random() < 0.15 else 1)]
    objects = [{key: value(filling, slot) for key, slot in parameters} for filling in fillings]
    text = " ".join(_told(record, rng, held_out).format(**filling) for filling in fillings)
    schema, asked = object_schema(parameters, "Entry" if rng.random() < 0.3 else "", rng.random() < 0.3), objects[0]
    if len(objects) > 1:
        name = rng.choice(("entries", "items", "list", "results"))
        schema = {"type": "object", "properties": {name: {"type": "array", "items": schema}}, "required": [name]}
        asked = {name: objects}
    asks = [ask for ask in OBJECT_ASKS if len(objects) == 1 or "{schema}" in ask]
    listed = _listed(keys) if len(keys) > 1 else keys[0]
    return rng.choice(asks).format(text=text, keys=listed, schema=json.dumps(schema)), json.dumps(asked)


def records(count: int = 100, seed: int = 2025, invented: bool = True) -> list[dict]:
    """The evaluation: half calls, half objects, in wordings that training never has; names are invented or natural."""
    rng, rows = Random(f"tools/{seed}"), []
    for i in range(count):
        if i % 2:
            question, answer = json_answer(rng, held_out=True, invented=invented)
            messages = [{"role": "user", "content": question}]
            rows.append({"messages": messages, "tools": None, "json": json.loads(answer)})
        else:
            offered = [offer(tool, rng, invented) for tool in rng.sample(TOOLS, 2)]
            ask, call, *_ = exchange(offered, rng, held_out=True)
            calls = [each["function"] for each in call["tool_calls"]]
            rows.append({"messages": [ask], "tools": [each.schema for each in offered], "calls": calls})
    return rows
