"""The word problems: patterns with slots, and the calculation that solves each.

Owns the wording and, beside each wording, the steps of its solution.
Knows nothing of tokens, chats, splits or models.

A pattern is plain text with
  {N} {M}            two different names; {he} {him} {his} {He} follow {N}
  {x} {y}            two different things that can be counted
  {a} {b} {c} {d}    numbers; the letter says how large (see RANGES)
  [one|two|three]    a free choice of wording, which changes nothing in the solution
Its steps are written "a+b; #-c": `#` is the result of the previous step, `#1` the result of the first.
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

# The same for the stories, and sentences that say nothing at all.
WIDE_DISTRACTORS = [
    *DISTRACTORS,
    "It happens in room {z}.", "{M} has {z} {y} at home.", "The {y1} is {z} years old.", "{M} is {z} years old.", "It is page {z}.",
    "A friend with {z} {zz} comes by.", "The road is {z} metres wide.", "There are {z} clouds in the sky.", "{M} waits for {z} minutes.",
    "The clock on the wall cost {z} {money}.", "It takes {z} minutes to get to {place}.", "{z} {y} lie in the corner, which nobody counts.",
    "The temperature is {z} degrees.", "{M} tells {z} jokes.", "The bus has number {z}.", "On the way {z} dogs bark.", "It is day {z} of the year.",
]  # fmt: skip
IDLE = (
    "The weather is fine.|It is a busy day.|{M} is watching.|Nobody is surprised.|It is raining outside.|That takes a while.|Everyone is happy.|"
    "{M} likes that.|It was {M}'s idea.|The sun is shining.|A dog barks.|{M} comes along.|All of them are new.|They look nice.|It is a cold {D}.|"
    "{M} has no time.|This happens every year.|What a day!|{M} wants to know more.|The door is open.|Some of them are {red}.|They come from {place}."
).split("|")
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
        ("A beekeeper owns {m} hives with {p} frames each and buys {q} frames for the spring. How many frames does he own now?", "p*m; #+q"),
        ("{N} is {a} pages into a novel. On Friday {he} reads {b} pages and on Saturday {c}. On which page is {he} then?", "a+b; #+c"),
        ("A kindergarten orders {m} packs of crayons. There are {p} crayons in a pack, and {q} of them arrive broken. How many crayons are whole?", "p*m; #-q"),
        ("{N} collects {a} bottles in the forest and {b} bottles at the lake. {He} takes {c} of them to the shop. How many bottles are still at home?", "a+b; #-c"),
        ("A flock of {a} geese rests on a field. {b} geese fly off, and a little later {c} geese land. How many geese are on the field?", "a-b; #+c"),
        ("The red rope is {a} cm long. The green rope is {b} cm shorter than the red one. How long are the two ropes together?", "a-b; #+a"),
        ("A farmer sells {m} sacks of potatoes for {p} euros each and {n} sacks of carrots for {q} euros each. How much money does he take in?", "p*m; q*n; #1+#2"),
        ("At the fair {N} spends {a} cents on rides, {b} cents on sweets and {c} cents on a balloon. How many cents does {he} spend?", "a+b; #+c"),
        ("A hotel buys {m} sets of {s} forks and {k} knives. How many pieces is that in total?", "s+k; #*m"),
        ("{N} wants to buy a guitar for {a} dollars. {He} has already saved {p} dollars in each of {m} months. How many dollars are missing?", "p*m; a-#"),
        ("A plumber charges {p} dollars an hour and {q} dollars for the trip. How much does a job of {m} hours cost?", "p*m; #+q"),
        ("{s} players are split into {m} teams of the same size. How many players are in {n} of these teams?", "s/m; #*n"),
        ("{N} bakes {s} rolls, and {his} sister bakes {t}. They pack all the rolls into {m} bags with equally many rolls. How many rolls are in a bag?", "s+t; #/m"),
        ("A teacher has {s} sheets of paper. {t} sheets are used up, and the rest is handed out to {m} pupils in equal shares. How many sheets does a pupil get?", "s-t; #/m"),
        ("A shirt costs {p} euros. On sale it is {s} euros cheaper. {N} buys {m} shirts on sale. How much does {he} pay?", "p-s; #*m"),
        ("A cinema has {m} rooms with {p} seats each. On Sunday {a} visitors are there. How many seats are empty?", "p*m; #-a"),
        ("{N} had {a} dollars in the bank. {He} withdrew {b} dollars in March and {c} dollars in April. How many dollars are still there?", "a-b; #-c"),
        ("In a game {N} has {a} points, loses {b} points in the second round and wins {c} points in the third. How many points does {he} have in the end?", "a-b; #+c"),
        ("A gardener picks {p} roses a day for {m} days and sells {q} of them. How many roses does he keep?", "p*m; #-q"),
        ("A train carries {a} passengers. {b} passengers board in Bern, and {c} leave in Basel. How many passengers are on the train after Basel?", "a+b; #-c"),
    ],
)
# Not trained on either: they show during training how new wordings are read.
DEV_HELD_OUT = _named(
    "devunseen",
    [
        ("{N} bred {a} rabbits last year. This year {b} were born and a neighbour took {c} of them. How many rabbits live with {N} now?", "a+b; #-c"),
        ("The mountain hut has {m} dormitories. In every dormitory {p} hikers can sleep. Tonight {q} bunks stay empty. How many hikers sleep there?", "p*m; #-q"),
        ("A taxi ride costs {p} cents a kilometre and {q} cents to get in. What must {N} pay for {m} kilometres?", "p*m; #+q"),
        ("{N}'s lemonade stand took in {a} cents before noon and {b} cents after. The lemons had cost {c} cents. What is the profit?", "a+b; #-c"),
        ("A librarian counts {a} novels, {b} atlases and {c} cookbooks. How many volumes are that altogether?", "a+b; #+c"),
        ("Out of {a} runners at the start {b} gave up on the first hill and {c} on the second. How many reached the finish?", "a-b; #-c"),
        ("{N} pours {s} ml of syrup evenly into {m} glasses. How much syrup do {n} glasses contain?", "s/m; #*n"),
        ("A hive of bees visits {p} blossoms a minute. How many blossoms does it visit in {m} minutes?", "p*m"),
        ("The bell tower is {a} steps high, the lighthouse {b} steps lower. {N} climbs both. How many steps are that?", "a-b; #+a"),
        ("A printer's tray holds {a} sheets. {N} prints {m} booklets of {p} sheets. How many sheets stay in the tray?", "p*m; a-#"),
        ("For a picnic {N} brings {m} baskets with {p} rolls and {M} brings {n} baskets with {q} rolls. How many rolls are at the picnic?", "p*m; q*n; #1+#2"),
        ("{N} mows {s} lawns before the holidays and {t} after. For each {he} gets {m} dollars. How much does {he} earn?", "s+t; #*m"),
        ("The swimming lesson has {s} children today, {t} of whom forgot their towels and sit out. The others swim in {m} lanes, equally many in each. How many are in a lane?", "s-t; #/m"),
        ("{N} and {M} dig out {s} and {t} carrots. They tie them into {m} equal bunches. How many carrots make a bunch?", "s+t; #/m"),
        ("An antique clock was offered for {p} euros. The dealer lets it go for {s} euros less. What would {m} such clocks cost?", "p-s; #*m"),
        ("At low tide {a} crabs crawl on the beach. A gull snatches {b}, and the next wave washes up {c}. How many crabs are on the beach?", "a-b; #+c"),
        ("A phone battery shows {a} minutes. A call costs {b} minutes, charging brings {c}. What does it show?", "a-b; #+c"),
        ("The coach of a football club hands out {m} jerseys to each of {p} players. {q} jerseys come back torn. How many are fine?", "p*m; #-q"),
        ("{N} has {a} beads on a string. The string breaks and {b} roll away; {M} finds {c} of them again. How many beads does {N} have?", "a-b; #+c"),
        ("The orchestra rents {m} buses for {p} euros each and a truck for {q} euros. What are the travel costs?", "p*m; #+q"),
        ("{N} gave the cashier {a} cents for {m} bananas at {p} cents each. How many cents did {he} get back?", "p*m; a-#"),
        ("A weaver makes {p} cm of cloth a day. After {m} days {he} cuts off {q} cm for a scarf. How long is the remaining cloth?", "p*m; #-q"),
        ("The new bridge is {a} metres long. That is {b} metres more than the old one. How long is the old bridge?", "a-b"),
        ("{N} is {s} years old and {his} grandfather is {m} times as old. How old are they together?", "s*m; #+s"),
        ("In the aviary there are {a} finches, {b} canaries and {c} budgies. {d} of the birds are moulting. How many are not?", "a+b; #+c; #-d"),
        ("A roll of tape is {a} cm. {N} needs {b} cm for a parcel and {M} {c} cm for a poster. How much tape is on the roll after that?", "a-b; #-c"),
        ("Each lunch box has {s} grapes and {k} biscuits. {N} packs {m} lunch boxes. How many pieces of food is that?", "s+k; #*m"),
        ("{s} tourists climb into {m} gondolas, the same number into each. {n} gondolas have reached the top. How many tourists are up there?", "s/m; #*n"),
        ("A ferry has room for {a} cars. {m} lanes with {p} cars are full. How many more cars fit on it?", "p*m; a-#"),
        ("{N} knows {a} French words. Every day {he} learns {p} new ones. How many does {he} know after {m} days?", "p*m; a+#"),
        ("A potter makes {m} shelves full of cups, {p} to a shelf. The kiln cracks {q}, and {s} are sold. How many cups does he have?", "p*m; #-q; #-s"),
        ("Since Monday {a} people have seen the film, {b} saw it on Tuesday and {c} today. How many tickets is that?", "a+b; #+c"),
        ("The snack machine was filled with {a} bars. By Wednesday {b} bars had gone, by Friday {c} more. How many bars does it still hold?", "a-b; #-c"),
        ("{N} weighs {p} kg and {his} dog {s} kg less. How much do they weigh together?", "p-s; #+p"),
        ("An electrician lays {a} metres of cable in the house and {b} metres in the garden. {c} metres have to be pulled out again. How many metres stay?", "a+b; #-c"),
        ("A class of {m} tables with {s} pupils each and {k} pupils on the bench goes skating. How many pupils go?", "s*m; #+k"),
        ("The choir sold {m} CDs at {p} euros and {n} programmes at {q} euros. How many euros did it earn?", "p*m; q*n; #1+#2"),
        ("{N} scored {a} in the first round, {b} less in the second. What is the score of both rounds?", "a-b; #+a"),
        ("{M} borrowed {a} dollars from {N}, gave back {b} and then borrowed {c} again. How many dollars does {M} owe {N}?", "a-b; #+c"),
        ("The warehouse ships {p} pallets a day and gets {s} pallets a day. By how many pallets does the stock shrink in {m} days?", "p-s; #*m"),
    ],
)
# Templates that were held out once: after their misreadings had been looked at they joined the training.
GUIDING = _named(
    "guide",
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
        ("A beehive gave {a} grams of honey in spring and {b} grams in summer. {N} ate {c} grams. How much honey is there still?", "a+b; #-c"),
        ("The ferry loads {a} cars, unloads {b} on the island and takes {c} others aboard. How many cars ride back?", "a-b; #+c"),
        ("For the play {m} scenes are rehearsed for {p} minutes each. A break of {q} minutes comes on top. How long does the evening last?", "p*m; #+q"),
        ("A quilt has {m} stripes of {p} patches. {q} patches are torn and cut out. How many patches does it keep?", "p*m; #-q"),
        ("{N} typed {a} words, deleted {b} and typed {c} again. How long is the text in words?", "a-b; #+c"),
        ("A well is {a} cm deep, a second well {b} cm deeper. How deep are the two wells if added?", "a+b; #+a"),
        ("One tower has {a} steps, its twin has {b} steps fewer. {N} climbs both. How many steps does {he} climb?", "a-b; #+a"),
        ("{m} classes send {p} letters each and {n} classes send {q} each. How many letters does the post office get?", "p*m; q*n; #1+#2"),
        ("A menu offers soup for {s} euros and fish for {p} euros. {m} guests order both. What is the bill?", "s+p; #*m"),
        ("A bike normally costs {p} euros, this week {s} euros less. What do {m} such bikes cost this week?", "p-s; #*m"),
        ("{s} chestnuts fall into {m} nests in equal parts. A squirrel empties {n} nests. How many chestnuts does it get?", "s/m; #*n"),
        ("{N} found {s} shells and {M} found {t}. They divide all of them among {m} cousins. How many shells go to each cousin?", "s+t; #/m"),
        ("Out of {s} seedlings {t} dry up, and the others are planted in {m} equal beds. How many seedlings are in one bed?", "s-t; #/m"),
        ("A stadium has {a} seats. {m} schools come with {p} pupils each. How many seats remain empty?", "p*m; a-#"),
        ("The scale shows {a} kg for the empty wagon. {m} sacks of {p} kg are put on it. What does it show now?", "p*m; a+#"),
        ("{N} owed {a} francs, paid back {b}, borrowed {c} more and paid back {p}. How many francs does {he} owe?", "a-b; #+c; #-p"),
        ("A choir of {a} sings on Friday. On Saturday {b} join, on Sunday {p} are ill and {q} return. How many sing on Sunday?", "a+b; #-p; #+q"),
        ("A cook bakes {m} trays of {p} buns, drops {q} buns and eats {s}. How many buns come to the table?", "p*m; #-q; #-s"),
        ("A candle shop pours {p} candles an hour and sells {s} an hour. How many candles pile up in {m} hours?", "p-s; #*m"),
        ("A route has {a} km of road and {b} km of track. {N} has done {m} stages of {p} km. How many km are ahead of {him}?", "a+b; p*m; #1-#2"),
        ("A postman has {a} letters in his bag. He delivers {b} in the first street and {c} in the second. How many letters are left in the bag?", "a-b; #-c"),
        ("{N} baked {m} plates of biscuits with {p} biscuits on each plate. {q} biscuits were burnt. How many good biscuits are there?", "p*m; #-q"),
        ("In a car park there are {a} cars. {b} cars drive away in the afternoon and {c} new cars arrive in the evening. How many cars are in the car park now?", "a-b; #+c"),
        ("A parrot costs {a} euros and its cage costs {b} euros more than the parrot. How much do the parrot and the cage cost together?", "a+b; #+a"),
        ("{m} friends each pay {p} dollars for the hotel and {N} pays {q} dollars for the petrol. How much did the trip cost?", "p*m; #+q"),
        ("The library lends out {p} books on each of {m} days and gets {q} of them back. How many books are still out?", "p*m; #-q"),
        ("{N} picks {a} strawberries, {M} picks {b}, and together they eat {c} of them. How many strawberries do they bring home?", "a+b; #-c"),
        ("A family drives {a} km on Saturday, {b} km on Sunday and {c} km on Monday. How long is the whole journey?", "a+b; #+c"),
        ("There are {m} buses with {p} children each and {n} buses with {q} children each. How many children go on the trip?", "p*m; q*n; #1+#2"),
        ("{N} has {a} dollars and buys {m} plants for {p} dollars each. How many dollars does {he} have afterwards?", "p*m; a-#"),
        ("{s} pancakes are divided equally among {m} children. How many pancakes do {n} of the children get?", "s/m; #*n"),
        ("{N} has {s} photos and takes {t} more. {He} puts them into {m} albums, the same number in each. How many photos are in each album?", "s+t; #/m"),
        ("Of {s} balloons {t} burst. The rest are shared equally by {m} children. How many balloons does each child get?", "s-t; #/m"),
        ("A box of chocolates holds {s} dark and {k} white chocolates. How many chocolates are in {m} boxes?", "s+k; #*m"),
        ("A ticket costs {p} euros, but children pay {s} euros less. How much do {m} children pay?", "p-s; #*m"),
        ("A theatre has {m} rows with {p} seats each. {a} seats are already sold. How many seats can still be sold?", "p*m; #-a"),
        ("{N} scored {a} points in the first game and {b} points fewer in the second game. How many points did {he} score in both games?", "a-b; #+a"),
        ("A fisherman caught {a} fish on Monday and {b} on Tuesday. He sold {c} at the market and gave {d} to his neighbours. How many fish does he have left?", "a+b; #-c; #-d"),
        ("{N} saves {p} dollars every month. After {m} months {he} buys a lamp for {q} dollars. How much money is left?", "p*m; #-q"),
        ("A bakery bakes {p} loaves every hour and sells {s} of them every hour. How many unsold loaves are there after {m} hours?", "p-s; #*m"),
    ],
)
TEMPLATES = {t.name: t for t in [*BARE, *ONE_STEP, *MANY_STEPS, *HELD_OUT, *DEV_HELD_OUT, *GUIDING]}
