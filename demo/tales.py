"""Gains and losses told about many domains, by many subjects, in many kinds of sentence; and verbs that nobody knows.

Owns how the words of `domains` are joined to a story. Knows nothing of numbers, splits or tokens.
The invented verbs stand where the rest of the text says what happened to the numbers ("are left", "more", "in all"):
so a verb that training never had can be read too.
"""

import re
from random import Random

from demo import domains, lexicon, words
from demo.lexicon import Subject
from demo.templates import Template

MARKED = re.compile(r"<(\w+)>")
LETTERS = "bcd"
LINKS = (
    "then|later|after that|next|afterwards|soon|a little later|the next day|in the evening|at noon|by evening|on {D}|in {D}|finally|"
    "an hour later|this morning|yesterday|during the week|after lunch|before dinner|over the weekend|in the meantime|last week|meanwhile|"
    "a few days later|one day|in the afternoon|at night|by the end of the day|in spring|in winter|at the weekend|tomorrow|since then|at last"
).split("|")
OWN_ASKS = (
    "How many X <do> S have now?|How many X <do> S have left?|How many X <be> left?|How many X <do> S have in the end?|How many X <do> S still have?|"
    "How many X remain?|How many X does that leave HIM with?|How many X <do> S end up with?|How many <do> S have now?|What is the number of X now?|"
    "How many X are there in the end?|With how many X <be> S left?|Find the number of X that S <have> now.|How many X does that make?|"
    "Work out how many X S <have> now.|What is HIS number of X now?"
).split("|")
LEFT = "How many [X |][are left|remain|<do> S still have|are still there|<do> S have left|stay with HIM|are left over|<do> S keep|are not yet gone|does that leave]?"
SUM = "[in total|altogether|in all|all together|]"
WHEN = "[on {D}|in {D}|in the morning|in spring|at first|before lunch|last week|at home|for M|in one hour|in the first round]"
WHEN2 = "[on {E}|in {E}|in the evening|in autumn|then|after lunch|this week|at work|for a friend|in the next hour|in the second round]"
# <u> and <w> are invented verbs; <u!> the participle
UNKNOWN = [
    (f"S <have> {{a}} X. S <u> {{b}} {WHEN} and {{c}} {WHEN2}. {LEFT}", "a-b; #-c"),
    (f"S <have> {{a}} X. S <u> {{b}} [of them|X] and <w> {{c}} [of them|more|others]. {LEFT}", "a-b; #-c"),
    (f"S <have> {{a}} X and <u> {{b}} of them. {LEFT}", "a-b"),
    (f"of [the |HIS |]{{a}} X {{b}} [are|get|have been] <u!>{WHEN}. {LEFT}".replace("<u!>", "<u!> "), "a-b"),
    ("{b} of [the |HIS |]{a} X [are|have been] <u!>. How many [X |]are not <u!>?", "a-b"),
    (f"of [the |HIS |]{{a}} X {{b}} [are|get] <u!> {WHEN} and {{c}} [are <w!> |]{WHEN2}. {LEFT}", "a-b; #-c"),
    (f"S <u> {{a}} X {WHEN} and {{b}} X {WHEN2}. How many X [<do> S <u0>|is that|are <u!>] {SUM}?", "a+b"),
    (f"S <u> {{a}} X {WHEN}, {{b}} {WHEN2} and {{c}} [at the end|after that]. How many X [<do> S <u0>|is that|are <u!>] {SUM}?", "a+b; #+c"),
    (f"S <u> {{a}} X, {{b}} Y and {{c}} Z. How many things [<do> S <u0>|is that|are that] {SUM}?", "a+b; #+c"),
    (f"S <u> {{a}} X. M <u> {{b}} [X |][more |]. How many [X |][<do> they <u0> together|is that {SUM}]?".replace("[more |]", ""), "a+b"),
    ("S <u> {a} X. [With M it is|For M it is|M <u>] {b} more[ than S|]. How many [X |][is that for M|does M <u0>]?", "a+b"),
    ("S <u> {a} X. [With M it is|For M it is|M <u>] {b} [fewer|less][ than S|]. How many [X |][is that for M|does M <u0>]?", "a-b"),
    (f"S <u> {{a}} X, M <u> {{b}} more[ than S|]. How many [X |][is that|do both <u0>|do they <u0>] {SUM}?", "a+b; #+a"),
    (f"S <u> {{a}} X, M <u> {{b}} [fewer|less][ than S|]. How many [X |][is that|do both <u0>|do they <u0>] {SUM}?", "a-b; #+a"),
    (f"S <have> {{a}} X and <u> [another|a further] {{b}}. [Then|Later] S <w> {{c}} [more|extra|new ones|additional X]. How many X <do> S have {SUM}?", "a+b; #+c"),
    (f"S <have> {{a}} X. S <u> {{b}} [more|new ones|additional X] and <w> {{c}} of [them|these]. {LEFT}", "a+b; #-c"),
    ("S <have> {a} X. S <u> {b} of [them|HIS X] and <w> {c} [new ones|additional X]. How many X <do> S have now?", "a-b; #+c"),
    ("S <u> {p} X [a day|per day|every day|each day|daily]. How many [X |][<do> S <u0>|is that|are <u!>] in {m} days?", "p*m"),
    ("S <u> {p} X [an hour|per hour|every hour] for {m} hours. How many [X |][<do> S <u0>|is that|are <u!>]?", "p*m"),
    (f"S <u> {{p}} X [an hour|per hour|every hour] for {{m}} hours and {{q}} [more |extra |]at the end. How many [X |][<do> S <u0>|is that|are <u!>] {SUM}?", "p*m; #+q"),
    (f"S <u> {{p}} X on each of {{m}} days. {{q}} of them are <w!>. {LEFT}", "p*m; #-q"),
    (f"each of {{m}} X <u> {{p}} Y. How many Y [are <u!>|is that|do they <u0>] {SUM}?", "p*m"),
    (f"{{m}} X <u> {{p}} Y each. {{q}} of the Y are <w!>. {LEFT.replace('X', 'Y').replace('[<do> S', '[<do> S').replace('[Y |]', '[Y |]')}", "p*m; #-q"),
    (f"{{m}} X <u> {{p}} Y each, and {{n}} Z <u> {{q}} Y each. How many Y [are <u!>|is that|do they <u0>] {SUM}?", "p*m; q*n; #1+#2"),
    ("S <u> {s} X equally [among|to|between] {m} Y. How many X [does each one get|go to each|are there for each]?", "s/m"),
    ("{m} X <u> {s} Y together, each as many. How many [Y |][does one X <u0>|does each <u0>]?".replace("one X", "each one"), "s/m"),
    ("{m} X <u> {s} Y. How many Y do {n} X <u0>[ at this rate| then|]?", "s/m; #*n"),
]


def draw(rng: Random) -> Template:
    """A story of gains and losses, or one with invented verbs."""
    return _unknown(rng) if rng.random() < 0.25 else _chain(rng)


def _chain(rng: Random) -> Template:
    kind = rng.random()
    table = domains.OWN if kind < 0.55 else domains.BUSINESS if kind < 0.72 else domains.PLACE
    things, opening, gains, losses, asks = (part.split("|") for part in rng.choice(table).split("#"))
    signs = [rng.choice("+-") for _ in range(rng.choice((1, 2, 2, 2, 3, 3)))]
    is_past = rng.random() < 0.45
    who = lexicon.subject(rng, "it" if table is domains.BUSINESS and rng.random() < 0.7 else "")
    pools = [[e for e in (gains if sign == "+" else losses) if "<" in e or not is_past] for sign in signs]
    events = [rng.choice(pool).replace("{v}", "{" + letter + "}") for pool, letter in zip(pools, LETTERS, strict=False)]
    if table is not domains.PLACE and things[0] not in MEASURES and (not asks[0] or rng.random() < 0.25):
        asks = OWN_ASKS
    if len(signs) == 2 and signs[0] == signs[1] and rng.random() < 0.45:
        events = [_said_once(events[0], rng)]
    if table is domains.PLACE:
        text = _in_place(rng, rng.choice(opening), events, is_past)
    else:
        text = _by_subject(rng, who, rng.choice(opening), events, is_past)
    ask = _question(rng.choice(asks), who, rng, is_past)
    thing = words.plural(words.invented(rng)) if things[0] in REPLACEABLE and rng.random() < 0.12 else rng.choice(things)
    if rng.random() < 0.06 and " if " not in text:
        text = f"{ask[:-1]} if {_lower(text[:-1])}?" if text.count(". ") == 0 and ask.endswith("?") else f"{text} {ask}"
    else:
        text = f"{text} {ask}"
    steps = "; ".join(f"{'#' if i else 'a'}{sign}{letter}" for i, (sign, letter) in enumerate(zip(signs, LETTERS, strict=False)))
    return Template("tale-" + "".join(signs), _filled(text, thing), steps)



def _said_once(event: str, rng: Random) -> str:
    """One verb for two numbers: "sells 12 on Monday and 30 more on Tuesday"."""
    verb = event[: event.index("{b}") + 3] if not event.startswith(("{b}", "!{b}")) else event
    whens = [("on {D}", "on {E}"), ("at first", "later"), ("in the morning", "in the evening"), ("last week", "this week"), ("by {D}", "by {E}")]
    (first, then), more = rng.choice(whens), rng.choice(("", "", "more ", "others "))
    return f"{verb} {first}{rng.choice((' and', ', then', ', and'))} {{c}} {more}{then}"


MEASURES = ("metres", "minutes", "kilograms", "members", "pages")  # these are not had
REPLACEABLE = ("books", "coins", "photos", "cards", "boxes", "trees", "tickets", "shirts", "bikes", "paintings")


def _filled(text: str, thing: str) -> str:
    """With its things, other person and places; these may come again and are slots of the drawing."""
    text = re.sub(r"\bX\b", thing, text.replace("{D}", "D").replace("{E}", "E"))
    text = re.sub(r"\b([DE])\b", r"{\1}", text)
    return re.sub(r"\bM\b", "{M}", re.sub(r"\bP\b", "{place}", text))


def _by_subject(rng: Random, who: Subject, opening: str, events: list[str], is_past: bool) -> str:
    """The opening and what the subject did, in one of several kinds of sentence."""
    own = all(event.startswith("<") for event in events)
    start = _clause(opening, who, is_past, who.name)
    if own and (style := rng.random()) < 0.6:
        forms = [_clause(event, who, is_past, "") for event in events]
        if style < 0.15 and opening.startswith("<") and who.he not in ("I", "we"):
            return f"{who.name}, who {_clause(opening, who, is_past, '')}, {_listed(forms, rng)}."
        if style < 0.3 and opening.startswith("<"):
            return f"{start}, {', '.join(forms[:-1]) + rng.choice((' and ', ', and ')) if forms[1:] else ''}{rng.choice(('and ', 'then ', '')) if not forms[1:] else ''}{forms[-1]}."
        if style < 0.4:
            done = [MARKED.sub(lambda m: lexicon.participle(m[1]), e).replace("HIS", who.his).replace("HIM", who.him) for e in events]
            have = who.verb("have", is_past)
            return f"{start}. {rng.choice(('Since then', 'So far', 'Until now', 'By {D}', 'Meanwhile'))} {who.he} {have} {_listed(done, rng)}."
        if style < 0.47:
            doing = [MARKED.sub(lambda m: lexicon.ending_ing(m[1]), e).replace("HIS", who.his).replace("HIM", who.him) for e in events]
            return f"{start}. {rng.choice(('That is before', 'This changes by', 'The day is spent'))} {_listed(doing, rng)}."
        return f"{start}. {rng.choice((who.he, who.he, 'then ' + who.he, rng.choice(LINKS) + ' ' + who.he, who.name))} {_listed(forms, rng)}."
    told = [_told(rng, event, who, is_past) for event in events]
    return ". ".join([start, *told]) + "."


def _told(rng: Random, event: str, who: Subject, is_past: bool) -> str:
    clause = _clause(event, who, is_past, who.he if rng.random() < 0.8 else who.name)
    if (place := rng.random()) < 0.45:
        return clause
    link = rng.choice(LINKS)
    if place < 0.85:
        return f"{link}{rng.choice((' ', ' ', ', '))}{clause}"
    return f"{clause} {link}" if link.startswith(("on", "in", "at", "by", "this", "yester", "over", "last")) else f"{link} {clause}"


def _in_place(rng: Random, opening: str, events: list[str], is_past: bool) -> str:
    start = _existing(opening, is_past)
    clauses = [_existing(event, is_past) for event in events]
    if rng.random() < 0.35:
        return f"{start}. {_listed(clauses, rng)}."
    told = [f"{rng.choice(LINKS)}{rng.choice((' ', ', '))}{c}" if rng.random() < 0.5 else c for c in clauses]
    return ". ".join([start, *told]) + "."


def _listed(parts: list[str], rng: Random) -> str:
    joint = rng.choice((" and ", ", and ", ", then ", " and then ", " but ", " and later "))
    return ", ".join(parts[:-1]) + (joint if parts[1:] else "") + parts[-1]


def _existing(clause: str, is_past: bool) -> str:
    """A clause with a subject of its own: counted things, or one thing in the third person."""
    clause = clause.removeprefix("!").removeprefix("~")
    plural = clause.startswith(("{", "there", "another", "customers", "families", "thieves", "birds", "plants"))
    form = Subject("", "they", "", "", plural)
    return MARKED.sub(lambda m: form.verb(m[1], is_past), clause)


def _clause(clause: str, who: Subject, is_past: bool, name: str) -> str:
    """A clause of the subject, named so, or with a subject of its own."""
    if clause.startswith("<"):
        clause = MARKED.sub(lambda m: who.verb(m[1], is_past), clause)
        clause = f"{name} {clause}".strip()
    else:
        clause = _existing(clause, is_past)
    his = who.his if name != who.name or who.he in ("I", "we") else f"{name}'" if name.endswith("s") else f"{name}'s"
    return clause.replace("HIS", who.his if clause.startswith(name) and name else his).replace("HIM", who.him)


def _question(ask: str, who: Subject, rng: Random, is_past: bool) -> str:
    past = is_past and rng.random() < 0.35
    named = who.he if rng.random() < 0.55 else who.name
    ask = re.sub(r"<(do|be)>(?= S)", lambda m: who.verb(m[1], past), ask)
    ask = re.sub(r"(?<=S )<(\w+)>(?= now\.|\.)", lambda m: who.verb(m[1], False), ask) if ask.endswith(".") else ask
    ask = ask.replace("<be>", "are")
    ask = MARKED.sub(r"\1", ask)
    return re.sub(r"\bS\b", named, ask).replace("HIS", who.his).replace("HIM", who.him)


def _unknown(rng: Random) -> Template:
    """Invented verbs in a text that says without them what is meant."""
    index = rng.randrange(len(UNKNOWN))
    text, steps = UNKNOWN[index]
    who, is_past = lexicon.subject(rng), rng.random() < 0.5
    verbs = {"u": words.invented(rng), "w": words.invented(rng)}
    if rng.random() < 0.35:
        verbs["u"] = rng.choice(KNOWN)
    while "[" in text:
        text = re.sub(r"\[([^\[\]]*)\]", lambda m: rng.choice(m[1].split("|")), text)
    text = re.sub(r"<([uw])!>", lambda m: lexicon.participle(verbs[m[1]]), text)
    text = re.sub(r"<([uw])0>", lambda m: verbs[m[1]], text)
    story, question = re.split(r"(?<=[.,]) (?=[A-Z][^.]*\?$)", text, maxsplit=1)
    they = Subject("", "they", "", "", True)
    story = re.sub(r"(of \{\w\} X|M) <([uw])>", lambda m: f"{m[1]} {Subject('', 'he', '', '', False).verb(verbs[m[2]], is_past)}", story)
    story = re.sub(r"(\} [XZ]) <([uw])>", lambda m: f"{m[1]} {they.verb(verbs[m[2]], is_past)}", story)
    story = re.sub(r"<([uw])>", lambda m: who.verb(verbs[m[1]], is_past), story)
    story = MARKED.sub(lambda m: who.verb(m[1], is_past), story)
    first = True

    def named(match: re.Match) -> str:
        nonlocal first
        name, first = (who.name if first or rng.random() < 0.2 else who.he), False
        return name

    story = re.sub(r"\bS\b", named, story)
    question = _question(question, who, rng, is_past)
    text = f"{story} {question}".replace("HIS", who.his).replace("HIM", who.him)
    text = re.sub(r"\bX\b", "{x}", re.sub(r"\bY\b", "{y}", re.sub(r"\bZ\b", "{zz}", re.sub(r"\bM\b", "{M}", text))))
    return Template(f"unknown-{index:02d}", text, steps)


KNOWN = (
    "count carry mark sort check weigh scan label polish paint visit photograph cover lift test record inspect study touch handle need use wash fold "
    "print stamp wrap repair cut roll pull push move turn type greet phone invite film sign mend tie fill order plant cook bake sell buy catch "
    "collect deliver pick throw kick hit steal earn save borrow hide burn see hear meet read write draw build sew feed eat drink"
).split()


def _lower(text: str) -> str:
    """A sentence inside another."""
    return text[0].lower() + text[1:] if text.split(" ")[0].lower() in ("a", "the", "there", "one", "my", "our", "we") else text
