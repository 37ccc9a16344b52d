"""Other nouns in a told problem: so that no noun of a fixed sentence says what is to be calculated.

Owns which words may be replaced and by what. A model that has read "2 eels, 3 pikes and 4 rays" many times knows the eels;
one that has read it of anything knows the sentence. Knows nothing of templates or numbers.
"""

import re
from random import Random

from demo import frames, words

REWORDED, REPLACED = 0.55, 0.4  # share of the texts that are touched, and of the nouns in them
NOUN = re.compile(r"(?:(?<=\d )|(?<=\ba )|(?<=\ban )|(?<=\b[Tt]he )|(?<=\bhis )|(?<=\bher )|(?<=\bof )|(?<=\bper )|(?<=[Ee]ach )|(?<=[Ee]very )|(?<=many )|(?<=\bA )|(?<=\bone ))[a-z]{3,}\b")
KEPT = frozenset(
    "more less fewer left them these those which whom rest others other remaining same equal total sum number new first second third last next "
    "whole half day days week weeks month months year years hour hours minute minutes night nights morning evening afternoon time times price "
    "cost bill difference amount money balance dollars euros cents pounds francs crowns coins pence years-old length weight height size end "
    "start beginning most few lot pair one ones two three his her its their this that all both each every and are was were is not old young "
    "person people group groups part parts share score change temperature debt discount voucher coupon profit gain loss rate fee tip rent "
    "weekend noon answer result meantime average goes does has was pass miss cross loss press less lasts costs weighs takes gives gets makes "
    "needs holds uses leaves comes runs keeps finds sells buys loses pays reads km cm mm kg grams metres litres degrees points percent "
    "extra single loose spare additional further another good bad full empty free broken equally own things pieces items usable course kinds red green blue white black large small".split()
)  # fmt: skip


def reworded(text: str, rng: Random) -> str:
    """The text with some of its nouns replaced, each wherever it stands, in the singular and in the plural."""
    if rng.random() > REWORDED:
        return text
    swaps: dict[str, str] = {}
    for found in dict.fromkeys(NOUN.findall(text)):
        is_plural = found.endswith("s") and not found.endswith("ss")
        if found in KEPT or found in swaps or rng.random() > REPLACED:
            continue
        if re.search(rf"\d {found}\b", text) and not is_plural:
            continue  # a verb may stand there: "12 leave"
        new = noun(rng)
        for old_one, old_many in _forms(found, is_plural):
            swaps |= {old_one: new, old_many: frames.plural(new)}
    if not swaps:
        return text
    return re.sub(r"\b(" + "|".join(map(re.escape, swaps)) + r")\b", lambda m: swaps[m[1]], text)


def _forms(word: str, is_plural: bool) -> list[tuple[str, str]]:
    """(singular, plural) of a word, as far as its letters tell."""
    if not is_plural:
        return [(word, frames.plural(word))]
    stems = [word[:-1]] + ([word[:-2]] if word.endswith("es") else []) + ([word[:-3] + "y"] if word.endswith("ies") else [])
    return [(stem, word) for stem in stems if stem not in KEPT]


def noun(rng: Random) -> str:
    """A noun: known, put together from two, or invented."""
    if (kind := rng.random()) < 0.4:
        return rng.choice(words.NOUNS)
    if kind < 0.7:
        first, second = rng.choice(words.NOUNS), rng.choice(words.NOUNS)
        return first[: (len(first) + 1) // 2] + second[len(second) // 2 :]
    return words.invented(rng)
