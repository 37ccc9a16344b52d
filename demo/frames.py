"""Products, prices, rates, comparisons, shares and rests, told about many pairs of things.

Owns the phrasings. Patterns are written as in `templates`; choices in brackets may be nested. {g} and {g1} are what holds
{x} and {x1}, from PAIRS or at random. Knows nothing of how a pattern becomes a problem.
"""

from random import Random

from demo import scenes, templates, words
from demo.templates import Template

PAIRS = (  # what holds, and what is in it
    "shelf book|tray bun|album photo|row desk|carton egg|bush berry|branch leaf|page picture|box pencil|case bottle|jar pickle|rack coat|"
    "chest drawer|wall painting|bench person|boat rower|bus passenger|wagon horse|street house|block flat|house window|tower bell|ship sailor|"
    "camp tent|tent camper|table guest|class pupil|school class|choir singer|band musician|troop scout|squad runner|crew worker|village family|"
    "field cow|pen sheep|barn goat|cage bird|nest egg|pond fish|tank shrimp|basket melon|bag onion|sack turnip|crate lemon|bunch flower|bed lily|"
    "pot plant|garden bush|orchard pear-tree|vine grape|bouquet carnation|wreath candle|cake candle|pizza-box slice|pack card|deck card|set stamp|"
    "sheet sticker|roll coin|purse coin|safe gold-bar|drawer spoon|cupboard plate|dishwasher cup|kit tool|toolbox screw|bucket nail|can bean|"
    "tin biscuit|packet seed|bar square|chocolate-box praline|net ball|court player|league club|lane swimmer|race rider|stable pony|kennel dog|"
    "hall chair|theatre row|balcony seat|coach seat|cabin bunk|dormitory bed|ward patient|clinic nurse|office computer|desk lamp|lamp bulb|"
    "chain link|necklace pearl|bracelet bead|dress button|shirt button|coat pocket|suitcase shirt|line towel|fence post|ladder rung|stair step|"
    "bridge cable|road lamp|park bench|playground swing|library reader|folder file|file sheet|notebook page|poem line|song verse|concert song|"
    "game round|test question|lesson exercise|course lesson|shift call|flight stop|tour stop|menu dish|bowl cherry|glass ice-cube|box match|"
    "spider leg|beetle spot|octopus arm|dog-sled dog|convoy truck|train carriage|pallet brick|container parcel|trolley suitcase|van mattress|"
    "museum statue|gallery portrait|shop mannequin|market stall|stall pumpkin|booth game|day visitor|hour visitor|city school|region town|quilt patch"
).split("|")
ALL = "[together|in total|in all|altogether|all together|]"
COUNT = f"[How many {{x}} [are there|is that|are that|are [in|on] the {{g}}|does {{N}} have|does {{N}} count|do they hold] {ALL}?|What is the [total |whole |]number of {{x}}?|[Find|Work out] the number of {{x}}.|How many {{x}} {ALL}?]".replace("How many {x} [together|in total|in all|altogether|all together|]?", "How many {x} in all?")
REST = (
    "[How many {x} [are left|remain|are left over|are there now|are still there|does {N} have now|can still be used|are in order|does {N} keep|stay|are not]?|"
    "What is the number of {x} now?|How many are left?|How many good {x} are there?|How many usable {x} does that leave?]"
).replace("|are not]", "]")
GROUP = (  # m times p
    "[[in|at|on] {place} there are {m} {g}. [There are|{N} counts|You can see|You find] {p} {x} [in|on] [each|each {g1}|every {g1}|each of them|every one of them|one {g1}]|"
    "a [building|company|man|woman|boy|girl|town|firm|club] has {m} {g} [with|of|, each with|that hold|containing|and each has|and every {g1} has] {p} {x}[ each|]|"
    "{m} {g} [with|of|containing|holding] {p} {x} [each|apiece] are [in {place}|delivered|ready|there]|{N} [owns|has|sees|buys|orders|rents|fills|cleans|unpacks|gets|brings] {m} {g} [with|of|, each with|, each of which has|, all with] {p} {x}|"
    "[a|one|each|every|the] {g1} [has|holds|contains|comes with|is made up of|carries|fits] {p} {x}. {N} [has|owns|buys|orders|fills|gets|takes|needs|packs] {m} [{g}|of them|such {g}|of these]|"
    "{x} [come|are sold|are packed|are stored|are kept] in {g} of {p}. {N} [has|buys|orders|takes|opens|sees|gets] {m} [{g}|of them|]|"
    "{N} [puts|sets|places|packs|lays|plants|arranges|sticks] {p} {x} [in|on|into|onto] each of {m} {g}|{m} {g} [each have|each hold|each contain|have|hold|carry] {p} {x}[ each|]|"
    "{N} [orders|buys|gets] {m} {g} of {x}. [There are|You find|He counts|{N} finds] {p} {x} [in|to] [a|each|every|one] {g1}|"
    "there are {p} {x} [per|in a|in every|to a|to each] {g1}[ and|,] [there are |]{m} {g}[ in all|]|for each of {m} {g} {N} [buys|needs|brings|makes|wants] {p} {x}|"
    "[all|the] {m} {g} [in|of|at] {place} [have|hold|need|get] {p} {x} [each|apiece]|{N} has {p} {x} for [each|every one] of {his} {m} {g}|"
    "[{N} has|{N} makes|{N} fills|there are|in {place} there are] {m} {g} [full of|of|with] {x}, {p} [to a|to each|to the|in each|per|in every|a|for each] {g1}|"
    "{m} {g} [with|of] {x}, {p} [to a|in each|per] {g1}, [are|stand|lie] in {place}|[a|the] {y1} [of|with] {m} {g} with {p} {x} each]"
)
AWAY = (  # minus q
    "[{q} [{x} |of them |of the {x} |][are [broken|empty|missing|taken|occupied|full|used|booked|reserved|in use|not there|out of order|closed|spoiled|damaged|bad|burnt|lost|dead|absent|torn|rotten|faulty|"
    "thrown away|given away|sold|stolen|removed|cracked|defective|needed elsewhere|already taken|useless|dirty|cut down|eaten|locked]|break|fall|die|disappear|get lost|go bad|leave|arrive damaged|do not work|go missing|are sent back]|"
    "{q} [{x} |of them |]turn out to be [bad|broken|useless|faulty|spoiled|fake]|{N} [eats|takes away|breaks|sells|gives away|loses|uses|throws out|removes|drops|returns|keeps back|hands out|burns|sends off] {q} [of them|{x}|of the {x}]]"
)
TO = (  # plus q
    "[{q} [more |extra |single |loose |spare |additional |other ]{x} [are [added|found|bought|brought|delivered|ordered|put there]|come|lie on the table|arrive|follow|stand outside|stand beside them|are in the cellar]|"
    "{N} [also |][buys|finds|adds|gets|makes|brings|puts in|receives] [another {q}|{q} more|{q} extra {x}|a further {q}|{q} single {x}]|[besides|in addition|apart from that], there are {q} [loose |single |other |]{x}[ in {place}|]|"
    "[besides|in addition|on top of that], {N} [has|gets|finds|owns] {q} [loose |single |other |]{x}]"
)
TAKEN = "[{a} [{x} |of them |][are [taken|occupied|full|sold|used|booked|reserved|in use|gone|given out|rented|filled|finished|done|painted|checked]|have been [taken|sold|used|booked|removed|filled|done]]|{N} [sells|uses|takes|removes|books|fills|paints] {a} [of them|{x}]]"
FREE = "[How many {x} are [left|free|still free|empty|unused|not taken|still available|available|unsold|vacant|still to be done|still to do|not yet used]?|How many {x} remain?|How many are left?]"
CUR = "[{money}|{money}|cents|dollars|euros]"
PAY = f"[What does {{N}} [pay|have to pay|spend|owe] {ALL}?|How much does {{N}} [pay|spend|owe|need] {ALL}?|What is the [price|total|total price|total cost|bill|whole price|amount|sum]?|How much [is|does] it [come to|all][?|?]|How many {{money}} [is that|does that cost|are needed|does {{he}} pay] {ALL}?|How much is [the bill|everything|that] {ALL}?|What [is the cost|does it cost|do they cost|does everything cost] {ALL}?]".replace("How much [is|does] it [come to|all][?|?]|", "")
ONE = f"[{{x}} cost {{p}} {CUR} [each|apiece|a piece]|[a|one|each] {{x1}} [costs|is|sells for|is priced at|goes for] {{p}} {CUR}|the price of [a|one] {{x1}} is {{p}} {CUR}|for [a|one|each] {{x1}} [you|people|they] pay {{p}} {CUR}]"
BUYS = "[{N} [buys|takes|orders|wants|needs|gets|chooses|picks|pays for] {m}[ of them| {x}| such {x}|]|{m} [of them |{x} |][are bought|are ordered|are needed]]"
EXTRA = "[[delivery|shipping|wrapping|the box|service|a {y1}|the {y1}|the bag|a deposit|the ticket|insurance|assembly|parking|the tip|tax] [costs|is|comes to|adds] [another |]{q}[ more| {money}| {money} more| extra|]|{N} [also pays|adds|gives|must add|pays another] {q} [{money} |][for [delivery|shipping|wrapping|the box|service|a {y1}|the {y1}|a deposit|insurance|parking|transport]|as a tip|as a fee|on top]|there is a [fee|charge|tip|tax|deposit|surcharge] of {q} [{money}|]]"
OFF = "[{N} has a [coupon|voucher|gift card|discount] [for|of|worth] {q} [{money}|]|[the shop|the seller|{M}] [takes off|gives a discount of|lowers the bill by|takes away] {q} [{money}|]|[a coupon|a voucher|a discount] [saves|takes off] {q} [{money}|]|{M} [pays|gives|adds] {q} [{money} |]of [it|that]]"
PER = "[an hour|per hour|every hour|each hour|a day|per day|each day|daily|a week|per week|every week|a month|each month|a minute|every minute|per year|a night|per trip|per round|each time|a game|in every game]"
DOES = "[walks|drives|paints|makes|reads|writes|types|prints|sells|packs|washes|cleans|earns|saves|learns|plants|picks|bakes|collects|sews|swims|cycles|runs|checks|mends|repairs|sorts|fills|builds|digs|draws|spends|uses|loses|eats|drinks|answers|scores|delivers|sends|carries|counts|serves|produces|knits|needs|burns|pays|gets|puts aside|charges|pumps|types|lays|films|grows|hikes|sails|practises]"
DO = "[walk|drive|paint|make|read|write|print|sell|pack|wash|clean|earn|save|learn|plant|pick|bake|collect|sew|swim|run|repair|sort|build|draw|spend|use|eat|answer|score|deliver|carry|serve|produce|need|burn|pay|get|do]"
UNIT = "[{x}|{x}|{money}|km|metres|pages|litres|minutes|points|kg|lines|words|miles]"
TIMES = "[hours|days|weeks|months|minutes|years|nights|trips|rounds|games]"
ADJ_MORE = "[more|longer|heavier|taller|higher|older|larger|bigger|wider|deeper|dearer|farther|faster|stronger|more expensive|thicker|later]"
ADJ_LESS = "[less|fewer|shorter|lighter|smaller|lower|younger|narrower|cheaper|nearer|slower|thinner|less expensive|weaker|earlier]"
MEASURE = "[is {a} [cm|metres|years|km|mm|inches] [long|tall|high|old|wide|deep|thick]|weighs {a} [grams|kg|pounds]|costs {a} {money}|has {a} {x}|measures {a} [cm|metres]|holds {a} [litres|{x}|people]|takes {a} [minutes|hours|seconds]|earns {a} {money}|scores {a} points|has {a} [pages|seats|rooms|steps|inhabitants|legs|wheels|members|leaves]|covers {a} km|shows {a} {x}]"
THING = "[the {red} {x1}|a {x1}|the first {x1}|one {x1}|{N}|{N}'s {x1}|the {x1}|the {blue} {x1}|the {x1} in {place}]"
OTHER = "[the {blue} [one|{x1}]|a {y1}|the second[ one| {x1}|]|the other[ one| {x1}|]|{M}|{M}'s {x1}|the {y1}|the next one|the new one|the [one|{x1}] in the {g1}]"
BOTHASK = f"[[How much|How many|What|How long|How heavy|How tall|How many {{x}}|How old] [are|do] [the two|both|they|these two|the two of them] [weigh|cost|have|measure|come to|hold|take|make|be|] {ALL}?|What is [their [sum|total|total length|total weight|joint price]|the [sum|total] of both]?|How [many|much|long|heavy|high] is that {ALL}?|What do [both|the two|they] [cost|weigh|have|hold|take|earn|score|measure] {ALL}?]".replace("|be|]", "]")
ONEASK = "[How [many|much|long|heavy|tall|old|big|high] is [that|the second|the other|the other one|it]?|What is the [length|weight|price|height|size|number] of [it|the second|the other|the {y1}]?|What does [the second|the other|the {y1}|it] [cost|weigh|measure|have]?]"
SHARE = "[shares|splits|divides|deals out|hands out|distributes|gives out|spreads|sorts|packs|puts|cuts up|arranges]"
EVENLY = "[equally|evenly|in equal parts|fairly|in equal shares|so that all get the same|, the same number for each,|]"
AMONG = "[among|between|to|over|into|onto|for] {m} [{g}|people|children|friends|{y}|guests|teams|pupils|workers|neighbours|groups|parts|piles|heaps|rows]"
EACH = "[How many [{x} |][does each [one |{g1} |person |child |of them |]get|are [in|on] each [{g1}|pile|row|one]|go to each|are in one {g1}|does one get|come to each|are there [in|for|per] [each|{g1}|one]|make up one {g1}|does every {g1} receive]?|What is each one's share?|How [large|big] is [each|one] [share|part|pile|group]?]"
FEWER = "[{t} [of them |{x} |of the {x} |][are [broken|lost|eaten|sold|bad|used|taken out|set aside|missing|thrown away|rotten|spoiled|ill|absent|damaged|burnt]|break|get lost|go bad|fall down|do not come|leave|are given to {M}|burst|crack]|{N} [keeps|eats|uses|loses|sells|throws away|breaks|takes|hides|saves|removes] {t} [of them|{x}|for {him}self|]]".replace("{him}self", "{M}")
ADDS = "[{t} more [{x} |][come|arrive|are added|are found|are bought|join|are delivered]|{N} [finds|buys|gets|makes|adds|bakes|picks|receives] [another {t}|{t} more|{t} new ones]|{M} [brings|adds|gives|has|finds|makes] [{t}|{t} more|another {t}|{t} {x}]]"
THEREST = "[the [rest|others|remaining {x}|remainder|good ones|rest of them] [is|are|get|go] [divided|shared|split|put|packed|sorted|distributed|planted|laid|handed out]|{he} [shares|splits|divides|packs|puts|sorts|hands out] [the rest|the others|what is left|the remaining {x}|the remainder]]"
THEMALL = "[[all|everything|all of them|all {x}|they|the {x}] [is|are|get|go] [divided|shared|split|put|packed|sorted|distributed|handed out]|{he} [shares|splits|divides|packs|puts|sorts|hands out] [all|everything|them|all of them|all the {x}]]"
NOW = "[now|then|in the end|after that|today|]"

KINDS3 = "[{N} [has|sees|counts|buys|brings|finds]|there are|in {place} there are|[a|the] {g1} [holds|has|contains]] {a} {x}, {b} {y} and {c} {zz}"
KINDS2 = "[{N} [has|sees|counts|buys|brings|finds]|there are|in {place} there are|[a|the] {g1} [holds|has|contains]] {a} {x} and {b} {y}"
GONE = (
    "[are [broken|missing|taken|sold|lost|stolen|removed|gone|eaten|ill|bad|used|given away|thrown away|asleep|moulting|burnt|torn|spoiled|empty]|break|fall down|leave|"
    "go|disappear|get lost|roll away|run away|fly off|die|go bad|fall off|had gone|were gone|were sold|went]"
)
OPEN = "[{N} has {a} {x}|there are {a} {x} in {place}|[a|the] {g1} [holds|has|contains|is filled with|was filled with] {a} {x}|{a} {x} [lie|stand|are] in {place}]"
W1 = "[on {D}|by {D}|in {D}|on the first day|in the morning|before noon|in the first hour|first|last week|with the first wave]"
W2 = "[on {E}|by {E}|in {E}|on the second day|in the evening|after noon|in the next hour|later|this week|with the next one]"
FRAMES = [
    *[(f"{GROUP}. {COUNT}", "p*m")] * 2,
    *[(f"{GROUP}. {AWAY}. {REST}", "p*m; #-q")] * 4,
    *[(f"{GROUP}[.|, and|, but|. Then|. Later|. Today] {TO}. {COUNT}", "p*m; #+q")] * 3,
    *[(f"{GROUP}. {TAKEN}. {FREE}", "p*m; #-a")] * 3,
    (f"{GROUP}. {AWAY}, [and|then] {{s}} [more |][of them |][are repaired and come back|are replaced|are found again|come back]. {REST}", "p*m; #-q; #+s"),
    (f"{GROUP}. {AWAY}. [Later|Then|After that|On {{D}}] {{s}} [more|others|more of them] [break|are sold|are taken|leave|get lost|are given away]. {REST}", "p*m; #-q; #-s"),
    (f"{GROUP} and {{n}} {{h}} [with|of|holding] {{q}} {{x}}[ each|]. How many {{x}} [are there|is that|does {{N}} have] {ALL}?", "p*m; q*n; #1+#2"),
    (f"{{m}} {{g}} [have|hold|contain|carry] {{p}} {{x}} each[,| and] {{n}} [{{h}}|others|more {{g}}|smaller ones] [have|hold|contain|carry|only have] {{q}}[ each|]. {COUNT}", "p*m; q*n; #1+#2"),
    (f"[{{N}}|a farmer|a shop|the school|a firm] [sells|delivers|buys|orders|ships|brings|unloads|receives] {{m}} {{g}} [of|with] {{p}} {{x}}[ each|] and {{n}} {{g}} [of|with] {{q}} {{y}}[ each|]. How many [things|pieces|{{x}} and {{y}}|items] [are there|is that] {ALL}?", "p*m; q*n; #1+#2"),
    (f"{{m}} {{g}} [hold|have|contain] {{p}} {{x}} each. {{n}} {{g}} [with {{s}} {{x}} each |of {{s}} {{x}} |]are [sold|lost|given away|taken away|stolen]. {REST}".replace("[with {s} {x} each |of {s} {x} |]", "[with {s} {x} each|of {s} {x}] "), "p*m; s*n; #1-#2"),
    # money
    *[(f"{ONE}. {BUYS}. {PAY}", "p*m")] * 2,
    *[(f"{ONE}. {BUYS}[. |, and ]{EXTRA}. {PAY}", "p*m; #+q")] * 3,
    (f"{{N}} [buys|orders|rents|books|hires] {{m}} {{x}} [at|for] {{p}} {{money}} [each|apiece|per {{x1}}|a {{x1}}] [and|. Then|, then] {EXTRA}. {PAY}", "p*m; #+q"),
    (f"{ONE}. {BUYS}. {OFF}. {PAY}", "p*m; #-q"),
    *[("[a|the] [worker|teacher|doctor|cleaner|driver|guide|tutor|painter|babysitter|mechanic|lawyer|cook|guard|nurse|tailor|barber|{x1}|{N}|firm] [charges|takes|asks for|gets|earns|is paid|wants|costs] {p} {money} [an hour|per hour|a day|per lesson|a week|for each hour|per visit|a night] [and|plus|, and also|as well as] {q} [{money} |][for [the way|driving there|the start|materials|tools|the visit|coming|petrol|parts]|as a base fee|as a basic fee|as a fixed fee|once|on top]. [How much|What] [is|are|does {N} pay for|do you pay for|would one pay for|does it cost for|is the price of|is to be paid for] {m} [hours|days|lessons|weeks|visits|nights]?", "p*m; #+q")] * 2,
    (f"{{N}} [buys|takes|orders|picks|gets|pays for] {{m}} {{x}} [at|for] {{p}} {{money}} [each|apiece] [and|as well as|together with|plus|, also] {{n}} {{y}} [at|for] {{q}} [{{money}} |][each|apiece]. {PAY}", "p*m; q*n; #1+#2"),
    (f"[a|one|the] {{x1}} [costs|is|sells for] {{p}} {{money}}, [a|one|the] {{y1}} [costs |is |]{{q}}[ {{money}}|]. [{{N}}|a shop|a farmer] [sells|buys|orders|gets rid of|takes] {{m}} {{x}} and {{n}} {{y}}. [How much [money |]is that {ALL}?|How much [is paid|is earned|comes in|changes hands]?|What is the [sum|total|bill]?|How many {{money}} [is that|are paid|does that make]?]", "p*m; q*n; #1+#2"),
    ("[{N}|a farmer|a trader|the shop|a woman] sells {m} [{x}|{g} of {x}] [at|for] {p} {money} [each|apiece|a {g1}] and {n} [{y}|{g} of {y}] [at|for] {q} [{money} |][each|apiece]. [How much [money |][does {N} make|is that|is earned|comes together|is in the till]?|What [do the sales bring|are the takings]?]", "p*m; q*n; #1+#2"),
    (f"[a|one|each] {{x1}} costs {{s}} {{money}}, [a|one|each] {{y1}} [costs |]{{t}}[ {{money}}|]. {{m}} [people|friends|guests|children] [each [buy|take|want|order|have] [both|one of each]|[buy|take|want|order] both]. {PAY}".replace("{N}", "the group"), "s+t; #*m"),
    ("{N} [has|had|owns|takes] {a} {money}[ with {him}|] and [buys|bought|pays for|orders] {m} {x} [at|for] {p} {money} [each|apiece]. [How much [money |][is left|does {he} have left|remains|is still there]?|How many {money} [are left|does {N} have left|remain]?|What is left?|How much change does {he} get?]", "p*m; a-#"),
    *[("{N} [wants|would like|needs|is saving for|dreams of|plans to buy|hopes for] a {x1} [that costs|for|which costs|at] {a} {money}. {He} [has|saved|saves|puts aside|has put by|earns|has earned] {p} {money} [a month|every month|a week|each week|in each of {m} [weeks|months]|per day] [for {m} [weeks|months|days]|in {m} [weeks|months|days]]. [How much [is|money is] [missing|still missing|still needed|lacking]?|How many {money} [are missing|does {he} still need|does {he} lack|are still to be saved]?|What does {he} still need?]".replace("|in each of {m} [weeks|months]|per day]", "|per day]"), "p*m; a-#")] * 2,
    ("[a|the] {x1} costs {a} {money}. {N} pays [in {m} rates of {p} [{money}|]|{m} times {p} {money}|{p} {money} a month for {m} months]. [How much [is still to be paid|does {he} still owe|is left to pay]?|How many {money} are still to pay?]", "p*m; a-#"),
    (f"[a|one|each|the] {{x1}} [usually |normally |]costs {{p}} {{money}}[,| but|. Today|. In the sale|. For members|. At the end of the season|. On {{D}}] [it [is|costs] {{s}} [{{money}} |][less|cheaper|off]|the price [falls|drops|is cut] by {{s}}[ {{money}}|]|{{s}} [{{money}} |][are|is] taken off]. [{{N}} [buys|takes|orders] {{m}} [of them|{{x}}|at the new price]. {PAY}|[What|How much] do {{m}} [of them|{{x}}] cost {NOW}?]", "p-s; #*m"),
    (f"[a|one|each|the] {{x1}} costs {{p}} {{money}}[,| but|. Now|. From {{D}} on|. Next year] [it is {{s}} [{{money}} |][more|dearer]|the price [rises|goes up] by {{s}}[ {{money}}|]]. [{{N}} [buys|takes|orders] {{m}} [of them|{{x}}|at the new price]. {PAY}|[What|How much] do {{m}} [of them|{{x}}] cost {NOW}?]", "p+s; #*m"),
    # rates
    *[(f"{{N}} {DOES} {{p}} {UNIT} {PER}. How [many|much] [{{x}} |][is that|does {{he}} {DO}|does that make] [in|after|for] {{m}} {TIMES}?", "p*m")] * 2,
    (f"[for|over|during] {{m}} {TIMES} {{N}} {DOES} {{p}} {UNIT} {PER}. [Then|After that|On the last day|In the end|Afterwards] {{he}} {DOES} {{q}} [more|in one go|extra]. How [many|much|far|long] is that {ALL}?", "p*m; #+q"),
    *[(f"{{N}} {DOES} {{p}} {{x}} {PER} [for|over|during] {{m}} {TIMES} and [sells|gives away|loses|throws away|eats|uses|breaks|sends off|hands out|drops|donates] {{q}} [of them|{{x}}]. {REST}", "p*m; #-q")] * 2,
    (f"{{N}} {DOES} {{p}} {{x}} {PER} [for|over|in] {{m}} {TIMES}. {AWAY}. {REST}", "p*m; #-q"),
    ("{N} has {a} {x}. [Every|Each] [day|week|hour|month] {he} [uses|eats|sells|loses|gives away|burns|spends|drinks|throws away] {p}[ of them|]. How many {x} [are left|remain|does {he} have] after {m} [days|weeks|hours|months]?", "p*m; a-#"),
    ("{N} has {a} {x}. [Every|Each] [day|week|hour|month] {he} [makes|finds|gets|collects|buys|adds|saves|wins] {p}[ more|]. How many {x} [are there|is that|does {he} have] after {m} [days|weeks|hours|months]?", "p*m; a+#"),
    (f"{{N}} {DOES} {{p}} {{x}} {PER} for {{m}} {TIMES}, {{M}} {DOES} {{q}} {{x}} {PER} for {{n}} {TIMES}. How many {{x}} [is that|do they {DO}] {ALL}?", "p*m; q*n; #1+#2"),
    (f"{{N}} {DOES} {{p}} {{x}} {PER}, {{M}} {DOES} {{s}} {{x}} [fewer|less]. How many {{x}} does {{M}} {DO} in {{m}} {TIMES}?", "p-s; #*m"),
    (f"[every|each] [day|week|hour|morning] {{N}} {DOES} {{p}} {{x}} and [sells|eats|gives away|loses|uses up|breaks] {{s}} [of them|]. How many {{x}} [are left|remain|are there|has {{he}}] after {{m}} [days|weeks|hours]?", "p-s; #*m"),
    (f"{{N}} {DOES} {{s}} {UNIT} in the morning and {{t}} [{UNIT} |]in the [evening|afternoon][ every day| each day| day by day|]. How [many|much] is that in {{m}} days?", "s+t; #*m"),
    ("[each|every|a|one] {g1} [has|holds|contains|is made of|consists of|comes with|needs] {s} {x} and {k} {y}. How many [things|parts|pieces|{x} and {y} together|items] [are|do] [in|you need for|make up|belong to|are in] {m} {g}?".replace("[are|do] [in|you need for|make up|belong to|are in]", "[are in|make up|belong to|go into]"), "s+k; #*m"),
    (f"[{{N}}|a school|a firm|a cook|the club] [buys|orders|gets|needs|packs|sells] {{m}} {{g}} [of|with|, each with|containing] {{s}} {{x}} and {{k}} {{y}}[ each|]. How many [things|parts|pieces|items|{{x}} and {{y}}] [is that|are that|are there] {ALL}?", "s+k; #*m"),
    (f"[each|every] [{{g1}}|team|crew|group|room|family] has {{s}} [men|{{red}} {{x}}|children|girls] and {{t}} [women|{{blue}} {{x}}|adults|boys]. How many [people|{{x}}|are there|are they] {ALL} in {{m}} [{{g}}|of them|groups|teams]?".replace("[people|{x}|are there|are they]", "[of them|{x}|people] are there"), "s+t; #*m"),
    # comparisons
    *[(f"{THING} {MEASURE}. {OTHER} [is|weighs|costs|has|measures|holds|takes|earns|scores|] {{b}} [cm|{{money}}|{{x}}|grams|kg|points|metres|] {ADJ_MORE}[ than [that|the first|{{N}}|it]|]. {BOTHASK}", "a+b; #+a")] * 2,
    *[(f"{THING} {MEASURE}. {OTHER} [is|weighs|costs|has|measures|holds|takes|earns|scores|] {{b}} [cm|{{money}}|{{x}}|grams|kg|points|metres|] {ADJ_LESS}[ than [that|the first|{{N}}|it]|]. {BOTHASK}", "a-b; #+a")] * 2,
    (f"{THING} {MEASURE}[,|;| and] {OTHER} {{b}} [cm|{{money}}|{{x}}|grams|points|] {ADJ_MORE}. {ONEASK}", "a+b"),
    (f"{THING} {MEASURE}[,|;| and] {OTHER} {{b}} [cm|{{money}}|{{x}}|grams|points|] {ADJ_LESS}. {ONEASK}", "a-b"),
    (f"{THING} {MEASURE}, {OTHER} {{b}}. {BOTHASK}", "a+b"),
    ("{N} [has|counts|finds|sells|reads|makes|scores] {a} {x}, {M} [has |]{b}. How many [more|more {x}] does {N} [have|count|find|sell|read|make|score][ than {M}|]?", "a-b"),
    ("{THING} {MEASURE}, {OTHER} {b}. [What is the difference|By how much do they differ|How big is the difference]?".replace("{THING}", THING).replace("{MEASURE}", MEASURE).replace("{OTHER}", OTHER), "a-b"),
    ("{N} [has|owns|reads|picks|finds|sells] {s} {x}. {M} [has|owns|reads|picks|finds|sells] {m} times [as many|that number|that]. How many {x} [do they have|is that|do both have] [together|in all|in total]?", "s*m; #+s"),
    ("{N} [has|owns|is|earns|weighs] {s} [{x}|years old|{money}|kg]. {M} [has|owns|is|earns|weighs] {m} times as [many|much|old|heavy]. How [many|much|old] [more |older |]is that[ for {M}|]?".replace("[more |older |]", ""), "s*m"),
    ("{N} [has|owns|picks|earns] {s} {x}. {M} [has|owns|picks|earns] {m} times as many. How many more [{x} |][has {M}|does {M} have|are that]?", "s*m; #-s"),
    (f"[{{a}} {{x}} [are|go] [in|to] the [first|{{red}}] {{g1}}|the [first|{{red}}] {{g1}} has {{a}} {{x}}], {{b}} [more |]in the [second|{{blue}}][ one|] and {{c}} [in|are in] the [third|last][ one|]. {COUNT}".replace("{b} [more |]in", "{b} in"), "a+b; #+c"),
    # lists
    *[(f"{{N}} {DOES} {{a}} {UNIT} on {{D}}, {{b}} on {{E}} and {{c}} on {{F}}. How [many|much] [is that|does {{he}} {DO}|does {{N}} {DO}] {ALL}?", "a+b; #+c")] * 2,
    (f"[in|over|during|on] [three|3] [days|weeks|months|years] [{{place}}|{{N}}|a shop|a zoo|the pool|a road] [has|counts|sees|sells to|serves|gets|welcomes] {{a}}, {{b}} and {{c}} [people|{{x}}|guests|customers]. How many [were there|is that|came|are that] {ALL}?".replace("|3]", "]"), "a+b; #+c"),
    (f"{{N}} [spends|pays|gives|loses|gets|earns|wins] {{a}} {CUR} [for|on] {{x}}, {{b}} [{{money}} |][for|on] {{y}} and {{c}} [{{money}} |][for|on] [a {{g1}}|{{zz}}]. How [much|many {{money}}] [is that|does {{he}} [spend|pay|give|get] {ALL}|is it]?", "a+b; #+c"),
    ("{N} [picks|collects|finds|gathers|has|brings|catches|makes] {a} {x} [in {place}|on {D}|at home] and {b} [{x} |][at the {y1}|on {E}|at {M}'s|in the {g1}]. {He} [sells|takes|gives|brings|sends|carries|leaves|returns|loses|uses|eats] {c} [of them|{x}][ to {M}| to the shop| at school| on the way| to the market|]. How many [{x} |][are left|remain|does {he} still have|are still at home|stay with {him}|does {he} keep]?", "a+b; #-c"),
    ("{a} {red} and {b} {blue} {x} [are|lie|stand] [in|on] [a {g1}|{place}]. {c} [of them |{x} |]are [taken|sold|broken|removed|lost|eaten]. How many [{x} |][are left|remain]?", "a+b; #-c"),
    ("[a|one] {g1} [holds|has|contains] {a} {x}, {b} of [them|which] are {red}[ and {c} are {blue}. The rest|. The others] are [{y}-coloured|plain|green]. How many are [that|plain|the rest]?".replace("[ and {c} are {blue}. The rest|. The others]", ". The others").replace("[{y}-coloured|plain|green]", "plain"), "a-b"),
    ("{a} {x} [are|lie] in a {g1}: {b} are {red}, {c} are {blue}, the [rest|others] are [plain|grey]. How many are [plain or grey|the rest|neither]?".replace("[plain or grey|the rest|neither]", "left for the rest"), "a-b; #-c"),
    (f"{{N}} is on [page|step|line|kilometre|level|number|stop|question] {{a}}. {{He}} [goes|reads|moves|gets|comes|climbs|works] [on |]{{b}} [further|more|ahead|forward] and [then |later |]{{c}} [further|more|ahead|forward]. [Where|On which [page|step|line|kilometre|level|number|stop|question]] is {{he}} {NOW}?", "a+b; #+c"),
    (f"{{N}} is on [page|step|line|level|number|stop] {{a}}. {{He}} [goes|moves|climbs] {{b}} [further|ahead|forward] and [then |later |]{{c}} back. [Where|On which [page|step|line|level|number|stop]] is {{he}} {NOW}?", "a+b; #-c"),
    (f"[a|the] [film|book|trip|way|project|list|race|course|fence|road] [has|is|takes] {{a}} {UNIT}[ long|]. {{N}} [has|is through] {{b}}[ done| behind {{him}}|]. How many are [left|still ahead|still to go|still to come]?".replace("[has|is through] {b}[ done| behind {him}|]", "[has done {b}|has {b} behind {him}|is through with {b}]"), "a-b"),
    (f"[a|the] [film|book|trip|way|project|list|race|course|fence|road] [has|is|takes] {{a}} {UNIT}[ long|]. {{N}} [does|finishes|covers] {{b}} [on {{D}}|first|in the morning] and {{c}} [on {{E}}|later|in the evening]. How many are [left|still ahead|still to go|missing]?", "a-b; #-c"),
    # shares
    *[(f"{{N}} {SHARE} {{s}} {{x}} {EVENLY} {AMONG}. {EACH}", "s/m")] * 2,
    (f"{{s}} {{x}} are [shared|split|divided|packed|sorted|dealt out|put|handed out] {EVENLY} {AMONG}. {EACH}", "s/m"),
    *[(f"[there are|{{N}} has|a class has|a shop has] {{s}} {{x}}. {FEWER}. {THEREST} {EVENLY} {AMONG}. {EACH}", "s-t; #/m")] * 3,
    *[(f"[{{N}} has|{{N}} bakes|{{N}} finds|{{N}} picks|{{N}} makes|{{N}} brings] {{s}} {{x}}. {ADDS}. {THEMALL} {EVENLY} {AMONG}. {EACH}", "s+t; #/m")] * 3,
    (f"{{N}} [has|bakes|picks|finds|makes|brings|buys] {{s}} {{x}} and {{M}} [{{t}}|has {{t}}|{{t}} {{x}}]. {THEMALL} {EVENLY} {AMONG}. {EACH}", "s+t; #/m"),
    *[("{s} {x} [are|get|were] [split|divided|put|sorted|packed|grouped|planted] [into|in] {m} [equal {g}|{g} of [the same|equal] size|{g}, the same number in each|equal groups|equal parts]. How many {x} [are|would be] [in|on] {n} [of them|{g}|of these {g}|such {g}|groups]?", "s/m; #*n")] * 2,
    ("{m} [equal |][{g}|{y}|people|machines|workers|hens|rooms|cars] [need|hold|make|use|have|carry|lay|eat|fit|produce] {s} {x}[ together| in all| a day|]. How many [{x} |]do {n} [of them |][need|hold|make|use|have|carry|produce]?", "s/m; #*n"),
    ("{m} {x} [cost|weigh|take|fill|make] {s} [{money}|kg|minutes|{y}|litres]. [What|How much] [do|would] {n} [of them |{x} |such {x} |][cost|weigh|take|fill|make]?", "s/m; #*n"),
    (f"{{m}} [people|friends|children|sisters|workers] [share|split|divide] {{s}} {{x}} {EVENLY}. {{N}}, [one of them|who is one of them], [then |later |]{{gets}}. How many {{x}} does {{N}} have {NOW}?".replace("{gets}", "[finds|gets|buys|receives] {b} more"), "s/m; #+b"),
    (f"{{m}} [people|friends|children|sisters|workers] [share|split|divide] {{s}} {{x}} {EVENLY}. {{N}}, [one of them|who is one of them], [then |later |][eats|loses|gives away|sells|breaks] {{n}}. How many {{x}} does {{N}} have {NOW}?", "s/m; #-n"),
    (f"{{N}} [has|packs|owns] {{s}} {{x}} in {{m}} equal {{g}}. [Each|One|Every] {{g1}} [gets|is given|receives] {{b}} more[ {{x}}|]. How many are in [one|each] {{g1}} {NOW}?", "s/m; #+b"),
    # longer
    ("{N} has {a} {x} and {b} {y}. {m} {g} [take|hold|need|use up] {p} [of these things|of them] each. How many things are left?", "a+b; p*m; #1-#2"),
    (f"{{m}} {{g}} of {{p}} {{x}} [arrive|are there|are bought]. {{q}} [are used|are sold|break|are eaten] [on {{D}}|first], {{s}} [on {{E}}|later]. {REST}", "p*m; #-q; #-s"),
    (f"[a|the] {{g1}} has {{a}} {{x}}. {{m}} [people|children|machines|cooks|teams] [take|use|need|eat] {{p}} each, then {{b}} [new ones |more |]are [put in|added|bought|brought]. {REST}", "p*m; a-#; #+b"),
    (f"{{m}} {{g}} of {{p}} {{x}} and {{a}} [single |loose |]{{x}} are [in {{place}}|there|counted]. {{s}} [of them |{{x}} |][are sold|break|are eaten|get lost]. {REST}", "p*m; #+a; #-s"),
    (f"{{N}} [has|owns] {{a}} {{x}}, {{M}} {{b}} [more|more than {{he}}]. [They|The two] [lose|give away|sell|eat|use] {{p}} [together|of them]. How many {{x}} [do they have|are left|remain] {NOW}?", "a+b; #+a; #-p"),
    (f"{{N}} [has|owns] {{a}} {{x}}, {{M}} {{b}} [fewer|less|fewer than {{he}}]. [They|The two] [find|get|buy|win] {{p}} more[ together|]. How many {{x}} [do they have|are there] {ALL}?", "a-b; #+a; #+p"),
    ("{N} buys {m} {x} at {s} {money} each and a {y1} for {p} {money}. {He} [pays with|gives] {a} {money}. [How much change does {he} get|How much does {he} get back|What is the change]?", "s*m; #+p; a-#"),
    (f"{{N}} [earns|gets|makes] {{p}} {{money}} {PER} for {{m}} {TIMES}[ and|. {{He}}] [spends|pays|loses|gives away] {{q}} [{{money}} |][for|on] {{y}} and {{s}} [for|on] {{zz}}. How much [money |]is left?", "p*m; #-q; #-s"),
    # several kinds of things at once
    *[(f"{KINDS3}. [{{d}} of [them|these|the things|all these|the lot]|{{d}} of the {{x}}] {{GONE}}. [How many [things |]are [left|still there]?|How many [of them |]are not?|How many remain?]", "a+b; #+c; #-d")] * 2,
    (f"{KINDS2}. {{c}} of [them|these|the things|all these] {{GONE}}. [How many [things |]are [left|still there]?|How many [of them |]are not?|How many remain?]", "a+b; #-c"),
    (f"{KINDS3}. How many [things|of them|pieces] [is that|are there|are that] {ALL}?", "a+b; #+c"),
    (f"{KINDS2}. How many [things|of them|pieces] [is that|are there|are that] {ALL}?", "a+b"),
    # said the other way round
    (f"{THING} {MEASURE}. [That|This|It] is {{b}} [cm|{{money}}|{{x}}|grams|kg|points|] {ADJ_MORE} than {OTHER}. {ONEASK}", "a-b"),
    (f"{THING} {MEASURE}. [That|This|It] is {{b}} [cm|{{money}}|{{x}}|grams|kg|points|] {ADJ_LESS} than {OTHER}. {ONEASK}", "a+b"),
    ("{N} has {a} {x}, {b} more than {M}. How many {x} does {M} have?", "a-b"),
    ("{N} has {a} {x}, {b} [fewer|less] than {M}. How many {x} does {M} have?", "a+b"),
    ("{N} has {a} {x}, {b} more than {M}. How many {x} do they have together?", "a-b; #+a"),
    # what grows and what shrinks
    (f"{{N}} [gets|makes|gains|earns|receives|takes in|buys] {{p}} {{x}} {PER} and [ships|sells|loses|uses|spends|gives away|burns] {{s}} {PER}. By how [many {{x}}|much] does [the number|the stock|that|it] [grow|rise|increase] in {{m}} {TIMES}?", "p-s; #*m"),
    (f"{{N}} [ships|sells|loses|uses|spends|gives away|burns] {{p}} {{x}} {PER} and [gets|makes|gains|earns|receives|takes in|buys] {{s}} {PER}. By how [many {{x}}|much] does [the number|the stock|that|it] [shrink|fall|sink|decrease] in {{m}} {TIMES}?", "p-s; #*m"),
    # what is said once and meant twice
    *[(f"{{OPEN}}. {{b}} {{GONE}} {{W1}}[,| and|, then] {{c}} [more |others |]{{W2}}. {REST}", "a-b; #-c")] * 2,
    *[("{OPEN}. {b} [more |][come|arrive|are added|are found|are bought|are put there] {W1}[,| and|, then] {c} [more |others |]{W2}. How many {x} [are there|is that|are there now]?", "a+b; #+c")] * 2,
    (f"{{OPEN}}. {{N}} [needs|uses|takes|sells|eats|loses|spends] {{b}} [for {{y}}|for a {{y1}}|{{W1}}] and {{M}} {{c}} [for {{zz}}|for the {{g1}}|{{W2}}]. {REST}", "a-b; #-c"),
    (f"{{OPEN}}. {{b}} [of them |]{{GONE}}; {{M}} [finds|brings back|gets back|saves|repairs] {{c}}[ of them|][ again|]. {REST}", "a-b; #+c"),
]
SCENES = 0.35  # share of fixed scenes


def draw(rng: Random) -> Template:
    """One of the phrasings, about a pair of things that go together, or about any."""
    if (kind := rng.random()) < SCENES:
        return rng.choice(scenes.SCENES if kind < 0.7 * SCENES else templates.GUIDING)
    index = rng.randrange(len(FRAMES))
    text, steps = FRAMES[index]
    for slot, phrases in (("{GONE}", GONE), ("{OPEN}", OPEN), ("{W1}", W1), ("{W2}", W2)):
        text = text.replace(slot, phrases)
    if rng.random() < 0.65:
        holder, thing = (noun.replace("-", " ") for noun in rng.choice(PAIRS).split())
        names = {"{g1}": holder, "{g}": plural(holder), "{x1}": thing, "{x}": plural(thing)}
        for slot, noun in names.items():
            text = text.replace(slot, noun)
    return Template(f"frame-{index:02d}", text, steps)


def plural(noun: str) -> str:
    """More than one of it, irregular ones too."""
    last = noun.split(" ")[-1]
    irregular = {"leaf": "leaves", "shelf": "shelves", "box": "boxes", "person": "people", "sheep": "sheep", "fish": "fish", "knife": "knives", "match": "matches"}
    if last in irregular:
        return noun[: -len(last)] + irregular[last]
    if last.endswith(("ry", "ty", "ily", "ony", "lly")):
        return noun[:-1] + "ies"
    return words.plural(noun)

