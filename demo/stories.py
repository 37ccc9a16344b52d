"""Word problems with free wording: a few situations, each told in very many ways.

Owns the phrasings of the training stories and how they are joined. Knows nothing of splits or tokens.
The fixed templates teach what is evaluated; the stories teach to read, so that a wording never seen can be solved.
Patterns are written as in `templates`; choices in brackets may be nested.
"""

from random import Random

from demo import situations
from demo.templates import Template

# The statements of a situation are first, then the questions. Steps follow the bar pairs of each entry.
GROUPS = (  # m groups of p
    "[there are {m} {g} [in|at|near] {place}, [each with {p} {x}|and each [holds|has|contains] {p} {x}]|"
    "{N} [has|owns|fills|packs|prepares|makes|keeps] {m} {g} [with|of] {p} {x} [each|apiece]|"
    "{N} [has|stores] {p} {x} in [each|every one] of {m} {g}|each of [the |]{m} {g} [in {place} |][holds|has|contains|carries] {p} {x}|"
    "[one|each|every] {g1} [holds|has|contains|takes] {p} {x}, and {N} [has|owns|needs|brings|uses] {m} [such |of these |]{g}|"
    "{m} {g} [stand|are] [in|at] {place}. [In each there are|Each has|Every one holds] {p} {x}|"
    "{N} [gets|receives|finds|makes] {p} {x} [a day|per day|every day|each {D}] for {m} [days|weeks]|"
    "[on|in] each of {m} [days|weeks|months] {N} [makes|collects|sees|paints|repairs] {p} {x}|"
    "{m} [people|children|friends|workers|teams] [each [bring|have|get|make|carry]|[bring|have|get|make|carry]] {p} {x}[ each|]|"
    "[on|in|inside] [every|each|any] {g1} there are {p} {x}, and [there are {m} {g}|{N} has {m} {g}|{m} {g} stand in {place}]|"
    "{N} [has|consists of|is made of|contains] {m} {g}, [[on|in] [each|every one] of [them|which] there are {p} {x}|and [on|in] [each|every] {g1} there are {p} {x}|every {g1} with {p} {x}]|"
    "{p} {x} [fit|go|belong] [in|into|on] [a|one|each|every] {g1}, and there are {m} {g}|{N} [visits|cleans|checks|opens] {m} {g} [that have|with] {p} {x} each|"
    "[each|every one] of {m} [people|children|guests|{g}] [in {place} |][receives|gets|takes|is given|needs|holds] {p} {x}|"
    "{m} times {N} [carries|brings|throws|counts|lifts|pulls] {p} {x}|{N} [does|makes|plays|runs|writes] {p} {x} [on each of|every day, for|daily for] {m} days|"
    "a {g1} of {p} {x} is [brought|sent|bought|carried in] {m} times]"
)
MORE = "[[and |][there are|{N} adds|{M} brings] {q} more|[and |]{q} [loose |single |extra |other |]{x} [are added|come on top|lie beside them|are there too]|[besides, |also, |then ]{N} [gets|finds|has] [another|an extra] {q}]"
LESS = (
    "[[but |then ]{q} [of them |of the {x} |][are [broken|lost|sold|missing|damaged|used|gone|empty|given away|rotten|stolen]|break|disappear|leave]|"
    "[then |later |]{N} [sells|loses|uses|removes|gives away|breaks|eats|spends|hides] {q} [of them|{x}|]|"
    "{M} [takes|buys|gets|borrows|eats|uses] {q} [of them|{x}|]]"
)
HOW_MANY = (
    "[How many {x} [are there|are there [in total|in all|altogether|now]|is that|does {N} have|are [in {place}|there in the end]]?|"
    "[What is|Find|Give] the [total |new |final |]number of {x}[?|.]|How many is that [in total|altogether|in all]?]"
)
HOW_MANY_LEFT = (
    "[How many {x} [are left|remain|are [still|now] there|does {N} [still |]have|stay]?|How many are [left|left over]?|"
    "What is the number of {x} that [are left|remain]?|How many {x} [does {N} have|are there] [now|in the end]?]"
)
TOTAL_PRICE = (
    "[How much does {N} [pay|spend|have to pay]|What does {N} [pay|have to pay|spend]|What is the [total|bill|total price|total cost|whole price|full amount]|"
    "How much [is that|is the bill|does it cost|does everything cost|is it]|How many {money} [is that|does {N} pay|are needed]][ in total| altogether| in all|]?"
)
ONE_PRICE = (
    "[{N} [buys|orders|takes|gets|wants|chooses] {m} {x} [at|for] {p} {money} [each|apiece|a piece]|"
    "[one|a|each|every] {x1} costs {p} {money}[ and|, and|.] {N} [buys|orders|takes|wants|needs] {m}[ of them|]|"
    "{N} [buys|orders|takes] {m} {x}[. Each [costs|is]|, which cost] {p} {money}[| each]|"
    "the price of [a|one] {x1} is {p} {money}. {N} [buys|orders|takes] {m} [of them|{x}]]"
)
SECOND_PRICE = (
    "[[and|as well as|plus] {n} {y} at {q} {money} [each|apiece]|"
    ". {He} also [takes|buys|orders] {n} {y} at {q} {money} each|and {n} {y}, each at {q} {money}|"
    ". [A|One|Each] {y1} costs {q} {money}, and {he} [takes|buys|gets] {n}[ of them|]]"
)
COMPARE_MORE = (
    "[{M} has {b} [more|more {x}][ than {N}|]|{M} has [{b} more than that|as many and {b} more]|with {M} it is {b} more|"
    "{M} [owns|counts|finds|has] {b} more than {N}]"
)
COMPARE_LESS = (
    "[{M} has {b} [fewer|less|fewer {x}][ than {N}|]|with {M} it is {b} [less|fewer]|"
    "{M} [owns|counts|finds|has] {b} fewer than {N}]"
)
BOTH = "[How many {x} do [they|the two|both|{N} and {M}] have [together|in total|altogether|in all|]?|How many {x} [is that|are there] [together|in total|altogether]?|What is the [sum|total][ of both|]?]"
HAS = "[{N} [has|owns|holds|counts|collected|brings|keeps] {a} {x}|[in|at] {place} {N} [has|keeps|counts] {a} {x}]"
LISTED = (
    "[On {D} {N} [sells|counts|makes|sees|buys|collects] {a} {x}, on {E} {b}[,|] and on {F} {c}|"
    "{N} [has|counts|sells|owns|needs] {a} {x}, {b} {y} and {c} {zz}|"
    "[in|at] {place} there are {a} {red}, {b} {blue} and {c} other {x}|"
    "three [people|{g}|friends|places] have {a}, {b} and {c} {x}|"
    "{a} {x} [come|arrive|are made|are sold] [on|in] {D}, {b} [on|in] {E}, {c} [on|in] {F}|"
    "the first {g1} [holds|has] {a} {x}, the second {b} and the third {c}|"
    "{N} [sells|makes|carries|counts] {a}, then {b}[,|] and then {c} {x}]"
)
LISTED_ASK = "[How many [{x} |things |]is that [in total|in all|altogether|together|]?|What is the total[ number|]?|How many [are there|are they] [in total|in all|altogether]?|Find the [sum|total].]"
TWO_KINDS = (
    "[[each|every] {g1} [has|holds|contains|needs|gets] {s} {x} and {t} {y}|[in|on] [each|every] {g1} there are {s} {x} and {t} {y}|"
    "{N} puts {s} {x} and {t} {y} into [each|every] {g1}|a {g1} [consists of|is made of|holds] {s} {x} and {t} {y}|"
    "one {g1} takes {s} {red} and {t} {blue} {x}]"
)
TWO_KINDS_ASK = "[How many [things|pieces|{x} and {y}|items|parts] are [in|on|needed for] {m} [such |of these |]{g}?|How many [things|pieces|items] [is that|are there] [in|for] {m} {g}?|{N} [has|makes|needs|orders] {m} {g}. How many [things|pieces|items] [is that|are that|are there] [in total|altogether|in all|]?]"
CAPACITY = "[{a} [of them |of the {x} |{x} |][are [already |now |][used|sold|full|broken|gone|old|reserved|closed|ready|locked|dirty|{red}|{blue}|ill|away]|have been [sold|used|given out]|were [sold|lost|painted|closed]]]"
FREE = "[How many {x} are [free|left|not [sold|used|ready|{red}|closed]|still there|unused|available|still to be used|the others]?|How many {x} can [still |]be [used|sold|given out|filled|opened]?|How many {x} [still work|can {N} still use|stay]?|How many {x} remain?|How many are [left|free]?]"
SHARE = (
    "[{N} [shares|divides|splits] {s} {x} [equally|evenly|fairly] [among|between] {m} [friends|people|children|{g}]|"
    "{s} {x} are [shared|split|divided] [equally|evenly] [among|between|by] {m} [friends|people|children|{g}]|"
    "{m} [friends|people|children] [share|divide] {s} {x} [equally|evenly]|{N} puts {s} {x} into {m} [equal {g}|{g}, the same number into each]]"
)
SHARE_ASK = "[How many {x} does each [one |]get?|How many {x} [are there for each|go to each|does one get]?|How many [is that for each|does each receive|are in each]?]"

SITUATIONS = [
    (f"{GROUPS}. {HOW_MANY}", "p*m"),
    (f"{GROUPS}. {MORE}. {HOW_MANY}", "p*m; #+q"),
    (f"{GROUPS}. {LESS}. {HOW_MANY_LEFT}", "p*m; #-q"),
    (f"{GROUPS}. {CAPACITY}. {FREE}", "p*m; #-a"),
    (f"{HAS}. [Also, |Besides, |]{GROUPS}. {HOW_MANY}", "p*m; a+#"),
    (f"{GROUPS}. {LESS}. [Then|Later|After that] {{b}} [more|new ones|new {{x}}] [come|arrive|are added|are bought]. {HOW_MANY}", "p*m; #-q; #+b"),
    (f"{ONE_PRICE}. {TOTAL_PRICE}", "p*m"),
    (f"{ONE_PRICE} [and|plus] [a {{y1}} for {{q}} {{money}}|{{q}} {{money}} for [transport|wrapping|service|a {{y1}}]]. {TOTAL_PRICE}", "p*m; #+q"),
    (f"{ONE_PRICE}. {{He}} also [pays|spends|gives] {{q}} {{money}} [for [a {{y1}}|the {{y1}}|wrapping|parking|service]|as a tip|]. {TOTAL_PRICE}", "p*m; #+q"),
    (f"{ONE_PRICE}[, and|. There is|, but there is] [a coupon |a discount |a voucher ]of {{q}} {{money}}[ off|]. {TOTAL_PRICE}", "p*m; #-q"),
    (f"{ONE_PRICE} {SECOND_PRICE}. {TOTAL_PRICE}", "p*m; q*n; #1+#2"),
    ("{N} has {a} {money}. " + f"{ONE_PRICE}. " + "[How much [money |]is left|How many {money} [are left|does {N} still have|remain]|What is left]?", "p*m; a-#"),
    (f"{GROUPS}, [and|while] {{n}} {{h}} [hold|have|contain|carry] {{q}} {{x}} each. {HOW_MANY}", "p*m; q*n; #1+#2"),
    ("{m} [people|teams|{g}] have {p} {x} each, {n} [others|other {g}|more people] have {q} each. " + HOW_MANY, "p*m; q*n; #1+#2"),
    (f"{GROUPS}. [Of these, |Then |]{{n}} {{g}} with {{s}} {{x}} each are [sold|taken|lost]. {HOW_MANY_LEFT}", "p*m; s*n; #1-#2"),
    (f"{HAS}. {COMPARE_MORE}. {BOTH}", "a+b; #+a"),
    (f"{HAS}. {COMPARE_LESS}. {BOTH}", "a-b; #+a"),
    (f"{HAS}. {COMPARE_MORE}. How many {{x}} does {{M}} have?", "a+b"),
    (f"{HAS}. {COMPARE_LESS}. How many {{x}} does {{M}} have?", "a-b"),
    (f"{HAS}. {COMPARE_MORE}. {{M}} [gives away|loses|sells|uses] {{c}}. How many {{x}} does {{M}} have [now|left]?", "a+b; #-c"),
    (f"{HAS}, {{M}} [has |]{{b}}. How many [more|more {{x}}] does {{N}} have than {{M}}?", "a-b"),
    ("the {x1} [weighs|costs|measures|takes] {a} [grams|{money}|cm|minutes], the {y1} {b} more. [What [are|is it for] both together|How much is that for both]?", "a+b; #+a"),
    ("the {x1} [weighs|costs|measures|takes] {a} [grams|{money}|cm|minutes], the {y1} {b} less. [What [are|is it for] both together|How much is that for both]?", "a-b; #+a"),
    ("{N} [has|picks|makes] {s} {x}. {M} [has|picks|makes] {m} times [as many|that number]. " + BOTH, "s*m; #+s"),
    (f"{LISTED}. {LISTED_ASK}", "a+b; #+c"),
    (f"{LISTED}. [Then|Later|But] {{d}} [are [lost|sold|given away|broken]|go missing]. [How many are left|What number is left|How many remain]?", "a+b; #+c; #-d"),
    (f"{TWO_KINDS}. {TWO_KINDS_ASK}", "s+t; #*m"),
    (f"{TWO_KINDS}. {TWO_KINDS_ASK}".replace("{t}", "{k}"), "s+k; #*m"),
    ("[a|one] {x1} costs {s} {money} and [a|one] {y1} {t} {money}. [How much do|What do] {m} [people|friends|of each|such pairs] [cost|pay|make]?", "s+t; #*m"),
    ("[a|one] {x1} [costs|weighs] {p} [{money}|kg], but {s} less [now|today|without {his} {y1}]. What [do|is it for] {m} {x}?", "p-s; #*m"),
    ("[each|every one] of {m} [people|{g}|children] [gets|receives|takes|holds|needs] {s} {x} and {t} {y}. How many [things|pieces|items] [is that|are needed|are there|are given out][ in total| in all|]?", "s+t; #*m"),
    ("[each|every] [{g1}|person|child] [out of|in a group of|of the] {m} [gets|has|brings|takes] {k} {x} and {t} {y}. How many [things|pieces|items|{x} and {y}] [is that|are there|come together]?", "k+t; #*m"),
    ("{N} [makes|does|counts|sells|reads|runs] {s} {x} [in the morning|at home|on the way there|before noon] and {t} [in the evening|at work|on the way back|after noon], [on each of {m} days|every day for {m} days|{m} days long]. How many {x} is that?", "s+t; #*m"),
    ("[every|each] [day|week|month] {N} [gets|makes|earns|finds] {p} {x} and [loses|sells|uses|spends] {s}. How many {x} [are left|remain|does {N} have] after {m} [days|weeks|months]?", "p-s; #*m"),
    ("{N} [makes|sells|sees|walks|reads] {p} {x} on each of {m} days and [only |]{q} on the [last day|day after|next day|following {D}]. [How many {x} is that|What is the total|How many {x} are that] [in all|altogether|]?", "p*m; #+q"),
    ("{N} [finds|has|brings|makes] {a} {x}, {M} [finds|has|brings|makes] {b} and [a friend|the third|{his} friend|another {g1}] {c}. How many {x} [do they have|is that|do all three have|are there] [together|in all|altogether|]?", "a+b; #+c"),
    ("[of|out of] [the |]{a} {x} [in {place} |of {N} |]{b} are [lost|sold|old|used|gone|ill|{red}], [then|later] {c} more [are lost|are sold|go|leave|fall down|get lost]. How many {x} [are left|stay|remain|are still there]?", "a-b; #-c"),
    ("{N} has {a} {x}. [On {D} |At first |]{b} [go|leave|are sold|are lost|fall off], [then|on {E}|later] {c} [more |][go|leave|are sold|are lost|fall off]. How many {x} [are left|stay|remain]?", "a-b; #-c"),
    ("[in {D}|at first|on {D}|in the beginning] {N} has {a} {x}. [The {x1} {y1}|{M}|A {y1}|The {y1}] [takes|costs|needs|eats|uses] {b}, [a {g1}|{M}|the {g1}|the mail] [brings|adds|gives|returns|yields] {c}. How many {x} [does {N} have|are there|are left] [now|then|]?".replace("The {x1} {y1}|", ""), "a-b; #+c"),
    ("[in {D}|at first|on {D}|in the beginning] {N} has {a} {x}. [{M}|A {y1}|The {y1}] [brings|adds|gives|returns|yields] {b}, [a {g1}|{M}|the {g1}] [takes|costs|needs|eats|uses] {c}. How many {x} [does {N} have|are there|are left] [now|then|]?", "a+b; #-c"),
    ("[a|the] {x1} [costs|weighs|takes|has] {a} [{money}|grams|{y}], [a|the] {y1} [costs|weighs|takes|has] {b} [less|fewer]. [How much|What] do [the|a] {x1} and [the|a] {y1} [cost|weigh|take|have] [together|in all|]?", "a-b; #+a"),
    ("[a|the] {x1} [costs|weighs|takes|has] {a} [{money}|grams|{y}], [a|the] {y1} [costs|weighs|takes|has] {b} more. [How much|What] do [the|a] {x1} and [the|a] {y1} [cost|weigh|take|have] [together|in all|]?", "a+b; #+a"),
    ("[a|the] {x1} [costs|weighs|takes|has] {a} [{money}|grams|{y}], [a|the] {y1} [costs|weighs|takes|has] {b} [{money}|grams|{y}]. [How much|What] do [they|both] [cost|weigh|take|have] [together|in all|]?", "a+b"),
    ("{s} {x} [stand|sit|lie|are put] in {m} equal {g}. How many {x} [are|stand|sit|lie] in {n} [{g}|of them]?", "s/m; #*n"),
    ("{m} {g} [hold|have|contain] {s} {x} [in all|altogether], all the same number. How many {x} [do {n} {g} hold|are in {n} {g}]?", "s/m; #*n"),
    (f"{SHARE}. {SHARE_ASK}", "s/m"),
    ("{N} has {s} {x} and [buys|finds|gets] {t} more. " + "{He} [shares|splits|divides] them [equally|evenly] among {m} [friends|people|{g}]. " + SHARE_ASK, "s+t; #/m"),
    ("{N} has {s} {x} and [keeps|eats|loses|uses] {t}. " + "The rest is [shared|split|divided] [equally|evenly] among {m} [friends|people|{g}]. " + SHARE_ASK, "s-t; #/m"),
    (f"{SHARE}. [One of them|{{M}}|The first] [gets|finds|is given] {{b}} more. How many {{x}} does [he|she|that one|{{M}}] have?", "s/m; #+b"),
    ("{m} {x} [cost|weigh] {s} [{money}|kg]. [What|How much] do {n} {x} [cost|weigh]?", "s/m; #*n"),
    *situations.SITUATIONS,
]
GAIN_VERBS = (
    "buys/bought;{v} more|finds/found;{v}[ more|]|gets/got;{v}[ more|] from {M}|receives/received;{v}[ more| as a present| by post| from {M}]|wins/won;{v}[ more|]|"
    "collects/collected;[another|a further] {v}|adds/added;{v}|makes/made;{v} [more|new ones]|borrows/borrowed;{v} from {M}|picks up/picked up;{v}[ more|]|"
    "takes/took;{v} more from {place}|orders/ordered;{v} [more|new ones]|brings/brought;{v} more|earns/earned;{v} more|is given/was given;{v}[ more| by {M}]|"
    "gathers/gathered;{v} more|inherits/inherited;{v}|builds/built;{v} more|discovers/discovered;{v} in {place}|fetches/fetched;{v} more|" + situations.GAIN_VERBS
)
LOSS_VERBS = (
    "gives/gave;{v} [to {M}|away]|loses/lost;{v}[ of them|]|sells/sold;{v}[ of them|]|breaks/broke;{v}[ of them|]|throws/threw;{v} away|uses/used;{v}[ of them| up]|"
    "hands/handed;{v} [out|over to {M}]|lends/lent;{v} to {M}|donates/donated;{v}|returns/returned;{v}[ of them|]|drops/dropped;{v}|removes/removed;{v}|"
    "trades/traded;{v}[ away|]|sends/sent;{v} to {M}|leaves/left;{v} [behind|in {place}]|forgets/forgot;{v} in {place}|hides/hid;{v} in {place}|burns/burned;{v}|"
    "puts/put;{v} aside|spends/spent;{v}|" + situations.LOSS_VERBS
)
GAIN_EVENTS = "{v} [more |new ones |][arrive|come|are delivered|are added|appear|are brought in|turn up]|{M} brings [another |]{v}[ more|]|{M} [gives|sends|lends|sells] {him} {v}[ more|]|" + situations.GAIN_EVENTS
LOSS_EVENTS = "{v}[ of them|] [are [lost|sold|taken away|removed|used up|stolen|given away]|break|go missing|disappear|leave|get lost]|{M} [takes|borrows|steals|buys] {v}[ of them|]|" + situations.LOSS_EVENTS
OPENINGS = "has/had|starts with/started with|keeps/kept|holds/held|possesses/possessed|counts/counted|begins with/began with|" + situations.OPENINGS
THERE = "[in|at] {place} there [are/were] {a} {x}|there [are/were] {a} {x} [in|at|near] {place}|{a} {x} [are/were] [in|at|near] {place}"
LINKS = ["then {he}", "later {he}", "after that {he}", "next {he}", "{he}", "{he}", "{N}", "on {D} {he}", "in the evening {he}", "finally {he}", "a week later {he}"]
EVENT_LINKS = ["then", "later", "after that", "", "", "on {D}", "the next day", "in the evening", "suddenly", "at noon"]
ENDS = (
    "How many {x} [are left|are there now|does {N} have now|remain|are there in the end|does {N} have in the end|does {N} still have|are there]?|"
    "How many [are left|are there now|remain|is that now|does {he} have now]?|What is the [new |final |]number of {x}?|[Find|Give] the number of {x} [now|in the end].|"
    "How many {x} does {he} have [then|now|after that|at the end]?|How many {x} [stay|does {N} keep|go on|does {he} end up with]?|"
    "How [much|many] is [left|there still|still there]?|How [long|big|many] is it [now|then|in the end]?"
)
LETTERS = "bcd"  # the numbers of the events, in order
DEBTS = 0.08  # of the told gains and losses


def draw(rng: Random) -> Template:
    """A story: one of the situations, or gains and losses told freely."""
    if rng.random() < 0.6:
        index = rng.randrange(len(SITUATIONS))
        return Template(f"story-{index:02d}", *SITUATIONS[index])
    return _events(rng)


def _events(rng: Random) -> Template:
    """Some things are there, some come, some go: in one sentence or many, now or in the past."""
    past, signs = rng.random() < 0.4, [rng.choice("+-") for _ in range(rng.choice((1, 2, 2, 2, 3)))]
    opening = "{N} " + _tense(rng.choice(OPENINGS.split("|")), past) + " {a} {x}"
    if rng.random() < DEBTS:
        return _debt(rng, past, signs)
    style = rng.random()
    phrases = [_verb(rng, sign, letter, past) for sign, letter in zip(signs, LETTERS, strict=False)]
    if style < 0.3:
        text = ", ".join([opening, *phrases[:-1]]) + rng.choice([" and ", ", and ", ", then "]) + phrases[-1]
    elif style < 0.5:
        text = f"{opening}. " + rng.choice(["{He}", "{N}", "Then {he}", "On {D} {he}"]) + " " + " and ".join(phrases)
    else:
        if rng.random() < 0.3:
            opening = THERE.replace("[are/were]", "were" if past else "are").split("|")
            opening = "[" + "|".join(opening) + "]"
        told = [_told(rng, sign, letter, past) for sign, letter in zip(signs, LETTERS, strict=False)]
        told[0] = told[0].replace("{he}", "{N}")
        text = ". ".join([opening, *told])
    return Template(f"events-{''.join(signs)}", f"{text}. [{ENDS}]", _event_steps(signs))


def _debt(rng: Random, past: bool, signs: list[str]) -> Template:
    """Money that is owed: paying makes it less, borrowing more."""
    verbs = {"+": situations.DEBT_MORE, "-": situations.DEBT_LESS}
    phrases = [_verb(rng, sign, letter, past, verbs[sign]) for sign, letter in zip(signs, LETTERS, strict=False)]
    opening = situations.DEBT_OPENING.replace("[owes/owed]", "owed" if past else "owes")
    joint = rng.choice([" and ", ", and ", ", then ", ". Then {he} ", ". Later {he} "])
    text = ", ".join([opening, *phrases[:-1]]) + joint + phrases[-1]
    return Template(f"debt-{''.join(signs)}", f"{text}. {situations.DEBT_END}", _event_steps(signs))


def _event_steps(signs: list[str]) -> str:
    return "; ".join(f"{'#' if i else 'a'}{sign}{letter}" for i, (sign, letter) in enumerate(zip(signs, LETTERS, strict=False)))


def _told(rng: Random, sign: str, letter: str, past: bool) -> str:
    """An event as a sentence of its own."""
    if rng.random() < 0.35 and not past:
        event = "[" + (GAIN_EVENTS if sign == "+" else LOSS_EVENTS).replace("{v}", "{" + letter + "}") + "]"
        return f"{rng.choice(EVENT_LINKS)} {event}".strip()
    return f"{rng.choice(LINKS)} {_verb(rng, sign, letter, past)}"


def _verb(rng: Random, sign: str, letter: str, past: bool, verbs: str = "") -> str:
    verb, rest = _choose(rng, verbs or (GAIN_VERBS if sign == "+" else LOSS_VERBS)).split(";")
    return f"{_tense(verb, past)} {rest}".replace("{v}", "{" + letter + "}")


def _choose(rng: Random, text: str) -> str:
    """One of the alternatives outside brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += {"[": 1, "]": -1}.get(character, 0)
        if character == "|" and not depth:
            parts.append("")
        else:
            parts[-1] += character
    return rng.choice(parts)


def _tense(verb: str, past: bool) -> str:
    return verb.split("/")[past]
