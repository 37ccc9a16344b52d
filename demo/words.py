"""The wide vocabulary of the training stories: many nouns, names, places, and invented words among them.

Owns those lists and how a set of them is drawn for a story. Knows nothing of calculations.
A model that has seen a few nouns learns sentences by heart. A model that has seen many nouns, and some invented ones,
learns to look at the statements about them.
"""

from random import Random

NAMES = (
    "Alma Anton Bella Bruno Carla Cem David Dora Emil Emma Erik Fatima Felix Flora Georg Greta Hana Hassan Helen Ian "
    "Ida Igor Iris Jana Jonas Julia Kai Karin Kofi Lara Liam Lina Lucas Lucy Malik Marta Mika Nadia Nils Nina Oleg "
    "Olga Otto Pia Peter Priya Rita Robin Ron Sara Simon Stella Theo Tina Uma Victor Vera Will Yara Yusuf Zack"
).split()
PERSONS = (
    "a boy|a girl|the teacher|a farmer|a baker|the gardener|the cook|a driver|the nurse|a student|my aunt|my uncle|"
    "the neighbour|a painter|a tailor|Mrs Green|Mr Bell|Mrs Young|Mr Stone|the captain|a pilot|the mayor|a sailor"
).split("|")
HOUSES = (
    "the shop|a store|the school|a farm|the club|a factory|the town|a village|the restaurant|a cafe|the company|"
    "the team|a clinic|the office|a theatre|the zoo|a workshop|the band|our class|the family|a market stall|"
    "the airport|a garage|the church|a camp|the harbour|the post office|a warehouse|the choir"
).split("|")
NOUNS = (
    "apple arrow bag ball balloon banana bed bell belt bench bike bird blanket block boat bolt bone book bottle bowl "
    "brick bridge brush bulb cable cake camera candle cap car card carpet carrot cart cat chain chair cherry cheese "
    "circle clock cloud coat coin comb cow crab crown cube cup curtain desk diamond doll door dot drawing drum duck "
    "egg engine envelope feather fence fig flag flower fork frog game gate gift glove goat grape guitar hammer hat "
    "helmet hen horse house insect island jacket jar jewel jug kettle key kite lamp leaflet lemon letter lion lizard "
    "lock log magazine map mask melon mirror model monkey mug nail necklace needle net note nut onion painting pan "
    "paper parcel parrot pebble pen pencil photo piano picture pie pig pillow pin pipe plane plant pot potato print "
    "puppet puzzle rabbit record ring rocket rope rose rug ruler sandwich sausage scarf seed shell ship shirt sign "
    "skirt snake soap sock spoon stamp star stick sticker stone sweet sweater table tablet tent ticket tie tile toast "
    "tomato tool towel toy train tree truck trumpet tulip turtle tyre umbrella vase violin visitor wagon watch wheel "
    "whistle window worm guest member worker sailor dancer singer tourist child-seat runner swimmer soldier monk "
    "patient passenger customer student reader player driver artist baker"
).split()
CONTAINERS = (
    "bag basket bin bottle bowl bucket bundle cabin cage can carton case chest column crate cupboard drawer field "
    "folder group heap hut jar kit line list lorry pack package page pallet pile pocket pot pouch rack ring roll row "
    "sack section set sheet stack stall string suitcase tin tower tray tube van wagon ward wing bus class block"
).split()
PLACES = (
    "the cellar|the attic|the yard|the park|the kitchen|the square|the forest|the hall|the cupboard|the barn|"
    "the stadium|the street|the valley|the harbour|the workshop|the office|the building|the station|the beach|"
    "the village|the drawer|the shed|the museum shop|the castle|the camp|the meadow|the corner shop|the depot"
).split("|")
MONEY = ["dollars", "euros", "cents", "pounds", "francs", "coins", "crowns", "pence"]
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday January March April August October December".split()
COLOURS = "red green blue white black yellow large small old new round square wooden fresh heavy light".split()
SYLLABLES = "ba be bo da de do fa fi ga go ka ki lo lu ma mi na ne pa pi ra ro sa so ta to va vo wa zu".split()
ENDINGS = "b d f g k l m n p r t x".split()


def draw(rng: Random) -> dict[str, str]:
    """Words for every slot of a story; different slots of a kind get different words."""
    subject, he = _subject(rng)
    him, his = {"she": ("her", "her"), "he": ("him", "his"), "it": ("it", "its")}[he]
    nouns, boxes, days = rng.sample(NOUNS, 3), rng.sample(CONTAINERS, 2), rng.sample(DAYS, 3)
    nouns = [invented(rng) if rng.random() < 0.2 else noun for noun in nouns]
    boxes = [invented(rng) if rng.random() < 0.15 else box for box in boxes]
    colours = rng.sample(COLOURS, 2)
    words = {"N": subject, "M": _other(rng), "he": he, "him": him, "his": his}
    words |= {"He": he.capitalize(), "His": his.capitalize(), "place": rng.choice(PLACES), "money": rng.choice(MONEY)}
    words |= dict(zip(("x1", "y1", "z1"), nouns, strict=True)) | dict(zip(("D", "E", "F"), days, strict=True))
    words |= {"x": plural(nouns[0]), "y": plural(nouns[1]), "zz": plural(nouns[2])}
    words |= {"g1": boxes[0], "g": plural(boxes[0]), "h1": boxes[1], "h": plural(boxes[1])}
    return words | {"red": colours[0], "blue": colours[1]}


def plural(noun: str) -> str:
    """More than one of it."""
    if noun.endswith(("s", "x", "ch", "sh")) or noun in ("tomato", "potato"):
        return noun + "es"
    return noun[:-1] + "ies" if noun.endswith(("ry", "rry", "lly", "ty")) else noun + "s"


def _subject(rng: Random) -> tuple[str, str]:
    kind = rng.random()
    if kind < 0.12:
        noun = invented(rng) if rng.random() < 0.3 else rng.choice(NOUNS)
        return f"{rng.choice(('a', 'the', 'one'))} {noun}", "it"
    if kind < 0.25:
        return rng.choice(HOUSES), "it"
    return rng.choice(PERSONS if kind < 0.4 else NAMES), rng.choice(("he", "she"))


def _other(rng: Random) -> str:
    return rng.choice(PERSONS) if rng.random() < 0.25 else rng.choice(NAMES[::-1])


def invented(rng: Random) -> str:
    return "".join(rng.choices(SYLLABLES, k=rng.choice((1, 2)))) + rng.choice(ENDINGS)
