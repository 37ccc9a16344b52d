"""English verbs in the forms that the training stories need, and who does what.

Owns conjugation and the subjects of stories with their pronouns. Knows nothing of calculations.
"""

from random import Random
from typing import NamedTuple

from demo import templates, words

# base: past, participle; verbs that are not here are regular
IRREGULAR = {
    base: (past, participle)
    for base, past, participle in (
        entry.split()
        for entry in (
            "be was been|have had had|do did done|buy bought bought|find found found|get got got|win won won|make made made|"
            "bring brought brought|build built built|catch caught caught|take took taken|give gave given|lose lost lost|"
            "sell sold sold|break broke broken|throw threw thrown|lend lent lent|send sent sent|leave left left|hide hid hidden|"
            "put put put|spend spent spent|eat ate eaten|drink drank drunk|pay paid paid|write wrote written|read read read|"
            "draw drew drawn|grow grew grown|dig dug dug|cut cut cut|burn burned burned|tear tore torn|lay laid laid|fly flew flown|"
            "come came come|go went gone|run ran run|swim swam swum|drive drove driven|ride rode ridden|rise rose risen|fall fell fallen|"
            "sink sank sunk|shrink shrank shrunk|hit hit hit|let let let|set set set|sew sewed sewn|sit sat sat|stand stood stood|"
            "steal stole stolen|keep kept kept|hold held held|know knew known|see saw seen|show showed shown|begin began begun|"
            "think thought thought|tell told told|teach taught taught|feed fed fed|lead led led|meet met met|withdraw withdrew withdrawn|"
            "forget forgot forgotten|choose chose chosen|freeze froze frozen|swap swapped swapped|drop dropped dropped|ship shipped shipped|"
            "stop stopped stopped|plan planned planned|trade traded traded|knit knitted knitted|pack packed packed|scrap scrapped scrapped|"
            "spill spilled spilled|melt melted melted|bend bent bent|blow blew blown|bite bit bitten|fight fought fought|hear heard heard|"
            "rob robbed robbed|step stepped stepped|slip slipped slipped|jump jumped jumped|hop hopped hopped|chop chopped chopped|"
            "sleep slept slept|sweep swept swept|wake woke woken|wear wore worn|split split split|spread spread spread|shut shut shut|"
            "cost cost cost|owe owed owed|die died died|lie lay lain|fit fitted fitted|rip ripped ripped|skip skipped skipped|"
            "refer referred referred|snap snapped snapped|transfer transferred transferred|commit committed committed|hatch hatched hatched|"
            "shoot shot shot|sling slung slung|stick stuck stuck|string strung strung|hang hung hung|leap leapt leapt|weave wove woven"
        ).split("|")
    )
}
VOWELS = "aeiou"


def ending_s(verb: str) -> str:
    """The third person."""
    if verb in ("have", "be", "do"):
        return {"have": "has", "be": "is", "do": "does"}[verb]
    if verb.endswith(("s", "x", "ch", "sh", "o", "z")):
        return verb + "es"
    return verb[:-1] + "ies" if verb.endswith("y") and verb[-2] not in VOWELS else verb + "s"


def past(verb: str) -> str:
    return IRREGULAR[verb][0] if verb in IRREGULAR else _ed(verb)


def participle(verb: str) -> str:
    return IRREGULAR[verb][1] if verb in IRREGULAR else _ed(verb)


def _ed(verb: str) -> str:
    if verb.endswith("e"):
        return verb + "d"
    return verb[:-1] + "ied" if verb.endswith("y") and verb[-2] not in VOWELS else verb + "ed"


def ending_ing(verb: str) -> str:
    if verb in ("lie", "die"):
        return verb[:-2] + "ying"
    if verb.endswith("e") and verb not in ("be", "see"):
        return verb[:-1] + "ing"
    doubled = past(verb).endswith(verb[-1] * 2 + "ed") or verb in DOUBLED
    return verb + verb[-1] * doubled + "ing"


DOUBLED = "get win run swim cut put let set sit hit dig spin begin forget split shut".split()


class Subject(NamedTuple):
    """Who acts: as first named, the pronoun, his and him; and whether verbs take the form of `they`."""

    name: str
    he: str
    his: str
    him: str
    is_plural: bool

    def verb(self, base: str, is_past: bool) -> str:
        """The form of a verb."""
        if base == "be":
            if self.he == "I":
                return "was" if is_past else "am"
            return ("were" if is_past else "are") if self.is_plural else ("was" if is_past else "is")
        if is_past:
            return past(base)
        return base if self.is_plural else ending_s(base)


GROUPS = (
    "the children|the twins|my parents|the neighbours|two friends|the students|the workers|the girls|the boys|the players|"
    "our teachers|the guests|the sisters|the brothers|the scouts|the farmers|the pupils|the tourists|my cousins|the owners"
).split("|")


def subject(rng: Random, kind: str = "") -> Subject:
    """A subject; `kind` "it": a thing or an institution."""
    draw = rng.random()
    if kind == "it":
        return Subject(rng.choice(words.HOUSES), "it", "its", "it", False)
    if draw < 0.08:
        return Subject("I", "I", "my", "me", True)
    if draw < 0.12:
        return Subject("we", "we", "our", "us", True)
    if draw < 0.20:
        return Subject(rng.choice(GROUPS), "they", "their", "them", True)
    if draw < 0.25:
        return Subject(f"{person(rng)} and {person(rng)}", "they", "their", "them", True)
    if draw < 0.31:
        return Subject(rng.choice(words.HOUSES), "it", "its", "it", False)
    he, his, him = rng.choice((("he", "his", "him"), ("she", "her", "her")))
    return Subject(rng.choice(words.PERSONS) if draw < 0.45 else person(rng), he, his, him, False)


def person(rng: Random) -> str:
    """A name, now and then an invented one."""
    if rng.random() < 0.12:
        return words.invented(rng).capitalize()
    return rng.choice(words.NAMES) if rng.random() < 0.7 else rng.choice(templates.NAMES)[0]
