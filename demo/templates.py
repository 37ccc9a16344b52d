"""The word problems: patterns with slots, and the calculation that solves each.

Owns the wording and, beside each wording, the steps of its solution.
Knows nothing of tokens, chats, splits or models.

A pattern is plain text with
  {N} {M}            two different names; {he} {him} {his} {He} follow {N}
  {x} {y}            two different things that can be counted
  {a} {b} {c} {d}    numbers; the letter says how large (see RANGES)
  [one|two|three]    a free choice of wording, which changes nothing in the solution
and its steps are written "a+b; #-c": `#` is the result of the step before, `#1` that of the first.
"""

from typing import NamedTuple

# The letter of a number says its range, so a pattern needs no table of its own.
RANGES = {
    **dict.fromkeys("ABC", (100, 999)),  # the bare sums and differences
    **dict.fromkeys("abcdef", (11, 480)),  # counts of things
    **dict.fromkeys("pqrv", (11, 99)),  # two digits: the long side of a product
    **dict.fromkeys("stuw", (3, 40)),  # small counts, what divisions start from
    **dict.fromkeys("mnkj", (2, 9)),  # one digit: the short side of a product, a divisor
    "z": (2, 99),  # a number that has nothing to do with the question
}


class Template(NamedTuple):
    """One wording and its solution; `name` identifies it in the split and in the evaluation's figures."""

    name: str
    text: str
    steps: str


def _named(group: str, rows: list[tuple[str, str]]) -> list[Template]:
    return [Template(f"{group}-{i:02d}", text, steps) for i, (text, steps) in enumerate(rows, 1)]


NAMES = [
    *((n, "she") for n in "Mia Ana Lena Ivy Ruth Nora Zoe Clara Ella Maya Tara Rosa Kim Eva Lily Sofia".split()),
    *((n, "he") for n in "Ben Tom Leo Sam Max Omar Paul Jack Adam Finn Noah Luis Ravi Karl Hugo Dan".split()),
]
PRONOUNS = {"she": ("she", "her", "her"), "he": ("he", "him", "his")}
THINGS = (
    "marbles stickers beads cards apples shells coins pencils buttons stamps books pears tickets stones "
    "cookies flowers postcards magnets candles lemons eggs crayons plums oranges badges ribbons nuts cups"
).split()

BARE = _named(
    "bare",
    [
        ("[What is|Calculate|Work out|Compute|Find] {A} + {B}[?|.|]", "A+B"),
        ("[What is|Calculate|Work out|Compute|Find] {A} - {B}[?|.|]", "A-B"),
        ("[What is|Calculate|Work out|Compute|Find] {p} [×|x|*|times] {m}[?|.|]", "p*m"),
        ("[What is|Calculate|Work out|Compute|Find] {a} + {b}[?|.|]", "a+b"),
        ("[What is|Calculate|Work out|Compute|Find] {a} - {b}[?|.|]", "a-b"),
        ("{a} + {b} = [?|]", "a+b"),
        ("{a} - {b} = [?|]", "a-b"),
        ("{p} [×|x|*] {m} = [?|]", "p*m"),
        ("[What is|Calculate|Work out|Compute] {s} [÷|/|divided by] {m}[?|.|]", "s/m"),
        ("[Add|Please add] {A} and {B}.", "A+B"),
        ("[Subtract|Please subtract|Take] {b} from {a}.", "a-b"),
        ("[Multiply|Please multiply] {p} by {m}.", "p*m"),
        ("[What is|Calculate|Work out] {a} + {b} + {c}[?|.]", "a+b; #+c"),
        ("[What is|Calculate|Work out] {a} + {b} - {c}[?|.]", "a+b; #-c"),
        ("[What is|Calculate|Work out] {a} - {b} + {c}[?|.]", "a-b; #+c"),
        ("[What is|Calculate|Work out] {p} [×|x|*] {m} + {c}[?|.]", "p*m; #+c"),
        ("[What is|Calculate|Work out] {p} [×|x|*] {m} - {c}[?|.]", "p*m; #-c"),
        ("[What is|Calculate|Work out] ({s} + {t}) [×|x|*] {m}[?|.]", "s+t; #*m"),
        ("[What is the sum of|Find the sum of] {a}, {b} and {c}[?|.]", "a+b; #+c"),
        ("[What is the difference between|Find the difference between] {a} and {b}[?|.]", "a-b"),
    ],
)

ONE_STEP = _named(
    "one",
    [
        ("{N} has {a} {x} and {M} has {b} {x}. How many {x} do they have [together|in total|altogether]?", "a+b"),
        ("There are {a} {x} in a box. {N} takes out {b}. How many {x} [are left|remain] in the box?", "a-b"),
        ("A [bag|box|packet] holds {p} {x}. How many {x} are in {m} such [bags|boxes|packets]?", "p*m"),
        ("{N} shares {s} {x} equally among {m} friends. How many {x} does each friend get?", "s/m"),
        ("A train carries {a} people. At the next stop {b} more get on. How many people are on the train now?", "a+b"),
        ("{N} read {b} pages of a book with {a} pages. How many pages are still to read?", "a-b"),
        ("One ticket costs {p} dollars. What do {m} tickets cost?", "p*m"),
        ("{N} is {a} cm tall. {M} is {b} cm shorter. How tall is {M}?", "a-b"),
        ("The bakery sold {a} rolls on Monday and {b} on Tuesday. How many rolls did it sell on both days?", "a+b"),
        ("{N} had {a} dollars and spent {b} of them. How much money does {he} have left?", "a-b"),
        ("{s} {x} are packed into {m} equal boxes. How many {x} go into each box?", "s/m"),
        ("A tank holds {a} litres. {b} litres are poured in on top of that. How many litres are in the tank now?", "a+b"),
        ("Every shelf carries {p} {x}. How many {x} are on {m} shelves?", "p*m"),
        ("{N} walked {a} metres and then another {b} metres. How far did {he} walk?", "a+b"),
        ("{N} collected {a} {x}, {M} only {b}. How many more {x} did {N} collect?", "a-b"),
        ("A [rope|ribbon] is {a} cm long. {N} cuts off {b} cm. How long is the rest?", "a-b"),
    ],
)

MANY_STEPS = _named(
    "many",
    [
        # gains and losses
        ("{N} has {a} {x}. {M} gives {him} {b} more. Then {N} loses {c}. How many {x} does {N} have now?", "a+b; #-c"),
        ("{N} had {a} {x}. {He} gave {b} to {M} and found {c} new ones. How many {x} does {he} have [now|in the end]?", "a-b; #+c"),
        ("A [shop|store] has {a} {x}. It sells {b} in the morning and {c} in the afternoon. How many {x} are left?", "a-b; #-c"),
        ("A library owns {a} books. It buys {b} new ones and gets {c} as a gift. How many books does it own now?", "a+b; #+c"),
        ("On a bus there are {s} people. At the first stop {t} get on and {u} get off. How many people are on the bus?", "s+t; #-u"),
        ("{N} saves {a} dollars in May and {b} in June. In July {he} spends {c}. How much is left?", "a+b; #-c"),
        ("A farmer picks {a} {x} on Monday, {b} on Tuesday and {c} on Wednesday. How many {x} is that in [all|total]?", "a+b; #+c"),
        ("There were {a} birds on the lake. {b} flew away, then {c} came. How many birds are on the lake now?", "a-b; #+c"),
        ("A tank holds {a} litres of water. {b} litres are used, {c} litres leak out and {d} litres of rain come in. How many litres are in it?", "a-b; #-c; #+d"),
        ("{N} starts a game with {a} points. {He} wins {b} points, loses {c} points and wins {d} more. What is {his} score?", "a+b; #-c; #+d"),
        ("A school has {a} girls and {b} boys. {c} of the pupils are ill today. How many pupils came to school?", "a+b; #-c"),
        ("{N} wants to read {a} pages. {He} reads {b} pages on Saturday and {c} on Sunday. How many pages are left to read?", "a-b; #-c"),
        # comparisons
        ("{N} has {a} {x}. {M} has {b} more than {N}. How many {x} do they have together?", "a+b; #+a"),
        ("{N} has {a} {x}. {M} has {b} fewer than {N}. How many {x} do the two have in total?", "a-b; #+a"),
        ("{N} picked {s} {x}. {M} picked {m} times as many. How many {x} did they pick together?", "s*m; #+s"),
        ("A red box weighs {a} grams, a blue box {b} grams more. What do both boxes weigh together?", "a+b; #+a"),
        ("The first hall has {a} seats, the second {b} seats fewer. How many seats are in both halls?", "a-b; #+a"),
        ("{N} is {s} years old. {M} is {m} times as old. How many years older is {M}?", "s*m; #-s"),
        ("Road one is {a} km long, road two is {b} km longer. What is the length of both roads?", "a+b; #+a"),
        # products and a sum
        ("A box holds {p} {x}. {N} has {m} boxes and {b} loose {x}. How many {x} does {he} have?", "p*m; #+b"),
        ("{N} buys {m} {x} at {p} cents each and a bag for {b} cents. What does {he} pay?", "p*m; #+b"),
        ("A [ticket|seat] costs {p} dollars. {N} buys {m} of them and uses a voucher worth {q} dollars. What does {he} pay?", "p*m; #-q"),
        ("There are {m} rows with {p} chairs each. {q} chairs are broken. How many chairs can be used?", "p*m; #-q"),
        ("{N} runs {p} metres [{m} times|in each of {m} rounds] and then walks {b} metres. How many metres is that?", "p*m; #+b"),
        ("A worker makes {p} parts an hour. After {m} hours {q} parts turn out to be faulty. How many good parts are there?", "p*m; #-q"),
        ("Every day {N} puts {p} cents into a jar. After {m} days {he} takes out {q} cents. How many cents are in the jar?", "p*m; #-q"),
        ("{m} friends bring {p} {x} each, and {N} adds {b} {x}. How many {x} are there?", "p*m; #+b"),
        ("{N} had {a} dollars. {He} bought {m} {x} for {p} dollars each. How much money is left?", "p*m; a-#"),
        ("A roll of wire is {a} metres long. {N} cuts {m} pieces of {p} metres each. How many metres are left?", "p*m; a-#"),
        ("The hall has {a} seats. {m} groups of {p} people sit down. How many seats stay free?", "p*m; a-#"),
        ("A cinema sold {a} tickets in advance and {m} groups of {p} people buy theirs at the door. How many tickets is that?", "p*m; a+#"),
        ("A truck carries {m} crates of {p} kg each. The empty truck weighs {a} kg. What is the total weight?", "p*m; a+#"),
        # two products
        ("{N} buys {m} {x} at {p} cents each and {n} {y} at {q} cents each. What does {he} pay [in total|altogether]?", "p*m; q*n; #1+#2"),
        ("A farmer fills {m} crates with {p} {x} and {n} crates with {q} {x}. How many {x} are in the crates?", "p*m; q*n; #1+#2"),
        ("An adult pays {p} dollars and a child {q} dollars. What do {m} adults and {n} children pay?", "p*m; q*n; #1+#2"),
        ("{N} earns {p} dollars an hour and works {m} hours. {M} earns {q} dollars an hour and works {n} hours. What do they earn together?", "p*m; q*n; #1+#2"),
        ("There are {m} tables with {s} seats and {n} tables with {t} seats. How many people can sit down?", "s*m; t*n; #1+#2"),
        ("{N} has {m} bags of {p} {x} and gives away {n} bags of {s} {x}. How many {x} are left?", "p*m; s*n; #1-#2"),
        ("In the first week a printer prints {p} pages on each of {m} days, in the second {q} pages on each of {n} days. How many pages is that?", "p*m; q*n; #1+#2"),
        ("A gardener plants {m} rows of {s} tulips and {n} rows of {t} roses. Then {u} flowers die. How many flowers are left?", "s*m; t*n; #1+#2; #-u"),
        ("{N} buys {m} pens at {s} cents and {n} books at {p} cents and has a coupon for {t} cents. How much does {he} pay?", "s*m; p*n; #1+#2; #-t"),
        # a sum, then a product
        ("Each [bag|basket] has {s} red and {t} green {x}. How many {x} are in {m} [bags|baskets]?", "s+t; #*m"),
        ("A lunch costs {s} dollars and a drink {k} dollars. What do {m} people pay who take both?", "s+k; #*m"),
        ("In a class there are {s} girls and {t} boys. Every child gets {m} {x}. How many {x} are needed?", "s+t; #*m"),
        ("{N} had {p} {x} and gave away {s}. {M} has {m} times as many as {N} has now. How many {x} does {M} have?", "p-s; #*m"),
        ("A coat costs {p} dollars but is {s} dollars cheaper today. What do {m} coats cost today?", "p-s; #*m"),
        ("{N} walks {s} minutes to school and {t} minutes back. How many minutes does {he} walk in {m} days?", "s+t; #*m"),
        ("A team has {s} old and {t} new players. Each needs {m} shirts, and {q} shirts are already there. How many shirts must be bought?", "s+t; #*m; #-q"),
        ("{N} packs {s} {x} and {t} {y} into each of {m} parcels. {q} more {x} stay on the table. How many things are there in all?", "s+t; #*m; #+q"),
        # divisions
        ("{N} has {s} {x} and gets {t} more. {He} shares them equally among {m} friends. How many {x} does each one get?", "s+t; #/m"),
        ("{N} has {s} {x}. {He} keeps {t} and shares the rest equally among {m} children. How many {x} does each child get?", "s-t; #/m"),
        ("{s} {x} are shared equally by {m} people. {N}, who is one of them, gets {a} more from {M}. How many {x} does {N} have?", "s/m; #+a"),
        ("{m} friends share {s} {x} equally. {N}, one of them, then eats {n}. How many {x} does {N} have left?", "s/m; #-n"),
        ("{s} {x} fit into {m} equal boxes. How many {x} fit into {n} such boxes?", "s/m; #*n"),
        ("{m} {x} cost {s} dollars. What do {n} {x} cost?", "s/m; #*n"),
        ("A machine fills {s} bottles in {m} minutes. How many bottles does it fill in {p} minutes?", "s/m; p*#"),
        # three and four steps
        ("{N} has {a} dollars. {He} gets {b} dollars from {M}, buys a game for {c} dollars and a book for {p} dollars. What is left?", "a+b; #-c; #-p"),
        ("A farm has {a} hens, {b} ducks and {p} geese. {q} of the birds are sold. How many birds are left?", "a+b; #+p; #-q"),
        ("Three [classes|groups] collect {a}, {b} and {c} {x}. They give away {d}. How many {x} do they keep?", "a+b; #+c; #-d"),
        ("{N} collected {a} {x}, {M} {b} fewer. They sell {p} of them. How many {x} do they have now?", "a-b; #+a; #-p"),
        ("The train leaves with {a} people. At one station {p} get off and {q} get on, at the next {r} get off. How many are on the train?", "a-p; #+q; #-r"),
        ("A baker makes {m} trays of {p} rolls. He sells {q} before noon and {s} after noon. How many rolls are left?", "p*m; #-q; #-s"),
        ("{N} reads {p} pages a day for {m} days. The book has {a} pages, and {he} skips {s} of them. How many pages are left?", "p*m; a-#; #-s"),
        ("A parking lot has {m} rows of {p} places. {a} cars are there, and {s} leave. How many places are free?", "p*m; #-a; #+s"),
        ("{N} saves {p} dollars a month for {m} months. {He} also gets {a} dollars and then spends {q}. How much does {he} have?", "p*m; #+a; #-q"),
        ("A box of {x} costs {p} cents, a box of {y} costs {s} cents less. What do {m} boxes of {y} and one box of {x} cost?", "p-s; #*m; #+p"),
        ("{N} swims {p} metres. {M} swims {s} metres more, on each of {m} days. How many metres does {M} swim?", "p+s; #*m"),
        ("A pool is filled with {p} litres a minute. It loses {s} litres a minute. How many litres are in it after {m} minutes, if it held {a} at the start?", "p-s; #*m; a+#"),
        ("A museum had {a} visitors on Friday, {b} more on Saturday than on Friday, and {c} on Sunday. How many visitors were there?", "a+b; #+a; #+c"),
        ("{N} bakes {a} cookies. {He} gives {p} to {M}, {q} to a neighbour and {r} to {his} class. How many are left?", "a-p; #-q; #-r"),
        ("The red team scores {p} points in each of {m} games, the blue team scores {a} points in all. By how many points is the red team ahead?", "p*m; #-a"),
        ("A bus makes {m} trips with {p} people each and one last trip with {s}. {a} of the people are children. How many are adults?", "p*m; #+s; #-a"),
        ("{N} has {m} albums with {p} photos each. {He} takes {q} photos out and adds {r} new ones. How many photos are in the albums?", "p*m; #-q; #+r"),
        ("In the storehouse there are {a} sacks of rice and {b} sacks of beans. {m} trucks take away {p} sacks each. How many sacks remain?", "a+b; p*m; #1-#2"),
        ("A printer has {a} sheets. It prints {m} copies of a report with {p} pages, and then {b} new sheets are put in. How many sheets does it have?", "p*m; a-#; #+b"),
    ],
)

# A longer family: any start, any two or three events, any closing question. It teaches what the verbs mean.
CHAIN_STARTS = [
    "{N} has {a} {x}.",
    "{N} starts with {a} {x}.",
    "At first {N} owns {a} {x}.",
    "In the morning {N} has {a} {x}.",
    "{N} counts {a} {x} in {his} room.",
    "There are {a} {x} in the basket of {N}.",
]
CHAIN_EVENTS = [
    ("{M} gives {him} {v} more.", "+"),
    ("{He} finds {v} more.", "+"),
    ("Then {he} buys {v}.", "+"),
    ("{He} gets {v} from {his} uncle.", "+"),
    ("After that {he} wins {v}.", "+"),
    ("{v} more arrive by post.", "+"),
    ("{His} sister adds {v}.", "+"),
    ("Later {he} collects another {v}.", "+"),
    ("{He} receives {v} as a present.", "+"),
    ("{He} picks up {v} on the way.", "+"),
    ("{He} gives {v} to {M}.", "-"),
    ("{He} loses {v}.", "-"),
    ("Then {he} sells {v} of them.", "-"),
    ("{v} of them break.", "-"),
    ("{M} takes {v} away.", "-"),
    ("After that {he} throws out {v}.", "-"),
    ("{He} uses {v} for a project.", "-"),
    ("Later {v} are stolen.", "-"),
    ("{He} hands {v} over to a neighbour.", "-"),
    ("{He} leaves {v} at school.", "-"),
    ("{He} donates {v}.", "-"),
    ("Then the number grows to {m} times as many.", "*"),
    ("{He} multiplies {his} stock by {m}.", "*"),
]
CHAIN_ENDS = [
    "How many {x} does {N} have [now|in the end|at last]?",
    "How many {x} are there [now|in the end]?",
    "What is the number of {x} [now|at the end]?",
    "How many {x} is that in the end?",
]

# Sentences that carry a number and no meaning for the question.
DISTRACTORS = [
    "{N} is {z} years old.",
    "It is {z} degrees outside.",
    "The house has number {z}.",
    "{M} was born {z} years ago.",
    "The walk there takes {z} minutes.",
    "A radio plays {z} songs.",
    "{N} lives {z} km away.",
    "{M} also owns {z} hats.",
    "The bus line is number {z}.",
    "{z} people are standing nearby.",
]

# Never seen in training: their problems are reported on their own.
HELD_OUT = _named(
    "unseen",
    [
        ("{N} owns {a} {x}, buys {b} more at the market and gives {c} of them to {M}. How many {x} are left?", "a+b; #-c"),
        ("At noon a kiosk had {a} newspapers. By evening it had sold {b} of them, and {c} new ones had arrived. How many newspapers does it have?", "a-b; #+c"),
        ("In a garden there are {m} trees with {p} plums each. {N} eats {q} plums. How many plums are left?", "p*m; #-q"),
        ("{N} orders {m} pizzas at {p} dollars each and pays {s} dollars for delivery. What is the total price?", "p*m; #+s"),
        ("{N} has {a} stamps. {M} has {b} stamps more. How many stamps do the two own together?", "a+b; #+a"),
        ("A hotel has {m} floors with {p} rooms each. {a} rooms are taken. How many rooms are free?", "p*m; #-a"),
        ("{N} buys {m} cups for {p} cents each and {n} plates for {q} cents each. What is the sum to pay?", "p*m; q*n; #1+#2"),
        ("Each team has {s} players and {k} coaches. How many people are in {m} teams?", "s+k; #*m"),
        ("{N} had {a} dollars, paid {b} dollars for shoes and {c} dollars for a hat. How many dollars are left?", "a-b; #-c"),
        ("On three days a museum counts {a}, {b} and {c} visitors. How many visitors came in total?", "a+b; #+c"),
    ],
)
# Not trained on either: they show during training how new wordings are read, and the stories were improved by what
# they showed. So their accuracy is no estimate of anything, and HELD_OUT was left alone.
DEV_HELD_OUT = _named(
    "devunseen",
    [
        ("{N} finds {a} {x} on the beach, {M} finds {b} and their friend {c}. How many {x} did the three find?", "a+b; #+c"),
        ("A cyclist rides {p} km on each of {m} days and on the last day only {q} km. How long was the tour?", "p*m; #+q"),
        ("Of the {a} lamps in a street {b} are broken, and then {c} more break. How many lamps still work?", "a-b; #-c"),
        ("A ship has {m} decks, on every deck there are {p} cabins, and {a} cabins are booked. How many cabins can still be booked?", "p*m; #-a"),
        ("A jacket costs {a} dollars, the trousers cost {b} dollars less. How much are the jacket and the trousers together?", "a-b; #+a"),
        ("{N} takes {m} sandwiches for {s} dollars each and {n} juices for {t} dollars each. How much is the bill?", "s*m; t*n; #1+#2"),
        ("Every child in a group of {m} receives {s} nuts and {k} sweets. How many things are handed out?", "s+k; #*m"),
        ("{s} pupils line up in {m} equal rows. How many pupils stand in {n} rows?", "s/m; #*n"),
        ("At the start of the month {N} has {a} dollars in the bank. The rent takes {b}, a refund brings {c}. How much is in the bank?", "a-b; #+c"),
        ("A swimmer does {p} laps before lunch and {q} after lunch, {m} days in a row. How many laps is that?", "p+q; #*m"),
    ],
)
TEMPLATES = {t.name: t for t in [*BARE, *ONE_STEP, *MANY_STEPS, *HELD_OUT, *DEV_HELD_OUT]}
