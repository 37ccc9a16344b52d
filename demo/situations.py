"""More situations of the training stories, told with many verbs and units.

Owns the phrasings that were added when problems with other verbs than those of `stories` turned out to be misread.
Patterns are written as in `templates`; choices in brackets may be nested. Knows nothing of how stories are joined.
"""

PEOPLE = (
    "[people|classes|children|teams|friends|workers|families|shops|schools|cooks|clubs|guests|players|girls|boys|farmers|"
    "drivers|groups|pupils|women|men|singers|sisters|brothers|cousins|neighbours|{g}]"
)
DO = (
    "[make|send|write|read|bake|paint|sell|carry|collect|type|bring|print|pack|need|pay|win|plant|knit|draw|pick|catch|count|"
    "walk|learn|throw|fold|clean|order|get|use|want|see|buy|deliver|wash|carve|build|lend|own|give|donate|receive|mend]"
)
DOES = (
    "[makes|sends|writes|reads|bakes|paints|sells|carries|collects|types|brings|prints|packs|needs|pays|wins|plants|knits|draws|"
    "picks|catches|counts|walks|learns|throws|folds|cleans|orders|gets|uses|wants|sees|buys|delivers|washes|carves|builds|gives]"
)
UNIT = "[{y}|{money}|kg|grams|cm|metres|km|pages|minutes|hours|litres|steps|seats|points|lines|tons]"
IS = "[has|weighs|measures|costs|holds|takes|is|shows|gives|needs|uses|contains]"
OTHER = "[the other|the second|the next|its twin|its neighbour|a second one|another one|the one beside it|the {y1}|a {y1}|the old one|the new one|{M}'s]"
GONE = (
    "[get off|get out|go home|fall off|fall down|die|dry up|melt|rot|crack|tear|are torn|are cut out|are cut off|are eaten|are deleted|"
    "are ill|are unloaded|fly away|swim away|run away|drive off|sink|burst|are sent back|fail|are thrown away|check out|stay behind|"
    "are crossed out|wither|are broken|are bad|are stolen|are lost|do not work|are given to {M}|are removed|vanish|drop out|rust|fade|"
    "are sold|go to {M}|end up in the bin|have to go|are taken out|are cancelled]"
)
ADDED = (
    "[are added|come on top|are put on it|are put in|are loaded|lie on top|follow|come along|are laid on it|are filled in|"
    "are packed in|go in|are hung on it|stand on it]"
)
WHEN = "[now|then|in the end|at the end|after that|afterwards|]"
SUM = "[together|in all|in total|altogether|added up|if added|]"
HOW = f"[How many {{x}} [is that|are there|are they|do they {DO}|come together|does {{N}} get|arrive|are needed]|How many [is that|are there]|What is the [total|sum]] {SUM}?"
STAY = (
    f"[How many [{{x}} |][are left|remain|stay|are still there|does {{N}} keep|are there|can {{N}} sell|are still good|does it keep|go on|come back|arrive] {WHEN}?|"
    "What is left?|How many of them are left?]"
)
AMOUNT = f"[How much|How long|How heavy|How deep|How high|How wide|How many {{y}}|How many|What|How big] [is it|is that|are they|are both|are the two|does it {IS}|is the whole|does {{N}} need|does {{he}} {DO}] {WHEN} {SUM}?"
COST = "[[What|How much] [do|will] {m} [of them|{x}|such {x}] cost [now|then|this week|today|there|]?|[What is|How much is] the price of {m} [of them|{x}] [now|then|today|]?]"
THERE = "[How many {x} [does {M} get|is that|are in [them|these]|are these|does {M} [have|carry|take]]|How many is that]?"
MORE_BY = "[more|longer|deeper|higher|heavier|larger|wider|taller|dearer|older]"
LESS_BY = "[less|fewer|shorter|lower|lighter|smaller|cheaper|younger]"
MONEY_LEFT = (
    "[How much [money |][is left|is that now|does {N} have [now|left|then|afterwards|at the end]|does {he} still have|remains]?|"
    "How many {money} [are left|does {he} have [now|left|then|afterwards|at the end]|are there now|are in {his} purse|remain]?|What is left?|"
    "What does {N} have [then|now|in the end|afterwards]?]"
)
MONEY_AFTER = "[How much is that after {m} [months|weeks|days|years]?|How many {money} does {he} have after {m} [months|weeks|days|years]?|What is left after {m} [months|weeks|days|years]?]"
PAYS = "[pays|paid|spends|spent|gives|gave|lays out|needs]"
SELLS = "[sells|sold|repairs|washes|delivers]"
FOR = "[for [the |a |some |]|on [the |a |]]"
FEE = "[for [delivery|shipping|transport|wrapping|insurance|the way|installation|the box|service|parking|a {y1}|the {y1}]|as a tip|as a deposit|as a fee]"
FEE_IS = "[Delivery|Shipping|Transport|Wrapping|Insurance|Installation|The {y1}|A {y1}] [costs|is|comes to] {q} {money}[ more| on top| extra|]"
PAID = (
    "[What is the [total|whole price|total price|total cost|bill|sum|cost][ of everything| of the order|]?|How much [is that|does {N} pay|does {he} spend|is the bill|"
    "must {he} pay|did it cost|does it cost|is spent|is to be paid] {SUM}?|What does {N} [pay|spend|have to pay] {SUM}?|How many {money} is that {SUM}?]"
).replace("{SUM}", SUM)
EVERY = "[every|each|a|per] [month|week|day|year|hour]"
LOSES = (
    "[gives|gave|delivers|delivered|sells|sold|hands out|handed out|loses|lost|leaves|left|drops|dropped|throws away|threw away|spends|spent|uses|used|eats|ate|breaks|broke|"
    "sends|sent|posts|posted|puts down|put down|lays down|unloads|unloaded|hides|hid|lends|lent|gives back|gave back|burns|burned|cuts|takes out|pours out|removes|removed|"
    "serves|served|ships|shipped|donates|donated|returns|returned|plants|planted|wastes|wasted]"
)
GAINS = (
    "[gets|got|buys|bought|finds|found|collects|collected|picks|picked|picks up|picked up|loads|loaded|catches|caught|makes|made|earns|earned|wins|won|receives|received|takes|took|"
    "borrows|borrowed|gathers|gathered|orders|ordered|bakes|baked|harvests|brings|brought|unpacks|adds|added|draws|drew]"
)
SOMEWHERE = (
    "[on {D}|in {D}|at {place}|in {place}|in the first {g1}|in the first hour|in the morning|at the first stop|for {M}|to {M}|on the first day|before noon|at home|to a {y1}|at the start|"
    "in one {g1}|on the way|from {M}|to the neighbours|first]"
)
ELSEWHERE = (
    "[on {E}|in {E}|at the station|in the second {g1}|in the next hour|in the evening|at the next stop|for a friend|to a friend|on the second day|after noon|at work|to another {y1}|later|"
    "in another {g1}|on the way back|to the others|in the other|then|there too]"
)

SITUATIONS = [
    (f"{{m}} {PEOPLE} {DO} {{p}} {{x}} [each|apiece] and {{n}} [{PEOPLE}|others|more] {DO} {{q}} [each|apiece|]. {HOW}", "p*m; q*n; #1+#2"),
    (f"[each|every one] of {{m}} {PEOPLE} {DOES} {{p}} {{x}}, [and |]each of {{n}} [others|{PEOPLE}] {DOES} {{q}}. {HOW}", "p*m; q*n; #1+#2"),
    (f"{{m}} {PEOPLE} {DO} {{p}} {{x}} [each|apiece]. {HOW}", "p*m"),
    (f"{{m}} {PEOPLE} [each |]{DO} {{p}} {{x}}, and {{N}} {DOES} {{q}}[ more|]. {HOW}", "p*m; #+q"),
    (f"{{N}} {DOES} {{m}} {{g}} [of|with] {{p}} {{x}}. {{q}} [of them |{{x}} |]{GONE}. {STAY}", "p*m; #-q"),
    (f"{{N}} {DOES} {{m}} {{g}} [of|with] {{p}} {{x}}. {{q}} [of them |{{x}} |]{GONE}[ and|, then] {{s}} [more |]{GONE}. {STAY}", "p*m; #-q; #-s"),
    (f"{{N}} {DOES} {{m}} {{g}} [of|with] {{p}} {{x}}, [drops|loses|burns|breaks|spoils|wastes|forgets|sells|eats] {{q}} [{{x}} |]and [eats|gives away|loses|sells|returns|throws out|drops] {{s}}. {STAY}", "p*m; #-q; #-s"),
    (f"{{N}} {DOES} {{m}} {{g}} [of|with] {{p}} {{x}}, [drops|loses|burns|breaks|spoils|eats] {{q}} and [finds|gets|buys|makes] {{s}} [more|new ones]. {STAY}", "p*m; #-q; #+s"),
    (f"[a|one|the] {{x1}} {IS} {{a}} {UNIT}, {OTHER} [{IS} |]{{b}} [{UNIT} |]{LESS_BY}. {AMOUNT}", "a-b; #+a"),
    (f"[a|one|the] {{x1}} {IS} {{a}} {UNIT}, {OTHER} [{IS} |]{{b}} [{UNIT} |]{MORE_BY}. {AMOUNT}", "a+b; #+a"),
    (f"[a|one|the] {{x1}} {IS} {{a}} {UNIT}, {OTHER} [{IS} |]{{b}} [{UNIT} |]{LESS_BY}. {{N}} [takes|reads|climbs|buys|walks|carries|uses|needs|lifts] both. {AMOUNT}", "a-b; #+a"),
    (f"[a|one|the] {{x1}} {IS} {{a}} {UNIT}, {OTHER} [{IS} |]{{b}} [{UNIT} |]{MORE_BY}. {{N}} [takes|reads|climbs|buys|walks|carries|uses|needs|lifts] both. {AMOUNT}", "a+b; #+a"),
    ("[a|the] {x1} is {a} cm [deep|high|long|wide|tall]. [Another one|The {y1}|A second one] is {b} cm [deeper|higher|longer|wider|taller]. How [deep|high|long|wide|tall] [is it|is that one|is the {y1}|is the second]?", "a+b"),
    ("[a|the] {x1} is {a} cm [deep|high|long|wide|tall]. [Another one|The {y1}|A second one] is {b} cm [lower|shorter|smaller]. How [deep|high|long|wide|tall] [is it|is that one|is the {y1}|is the second]?", "a-b"),
    (f"[a|one|each] {{x1}} [normally|usually|otherwise|as a rule|mostly|] costs {{p}} {{money}}[,| but|, and] [this week|today|now|on {{D}}|in the sale|at {{M}}'s] [it is |][{{s}} {{money}} [less|cheaper]|{{s}} less|reduced by {{s}}|{{s}} {{money}} off]. {COST}", "p-s; #*m"),
    (f"[a|one|each] {{x1}} [normally|usually|otherwise|as a rule|mostly|] costs {{p}} {{money}}[,| but|, and] [this week|today|now|on {{D}}|in {{place}}|at {{M}}'s] [it is |][{{s}} {{money}} [more|dearer]|{{s}} more|raised by {{s}}]. {COST}", "p+s; #*m"),
    (f"{{s}} {{x}} [fall|go|are put|are sorted|are packed|are laid|come|are poured] [into|in] {{m}} {{g}} [in equal parts|evenly|in equal numbers|, as many in each|, the same in each]. {{M}} [empties|takes|opens|gets|carries off|buys|finds|steals|needs] {{n}} [of them|{{g}}]. {THERE}", "s/m; #*n"),
    ("{s} {x} [make|fill|give|are enough for|need] {m} {g}. How many [{x} |][make|fill|give|are enough for|need|are needed for] {n} {g}?", "s/m; #*n"),
    (f"{{N}} {DOES} {{s}} {{x}} and {{M}} {{t}}. [They|The two|Both|Together they] [divide|share|split|deal out|spread|hand out] [all|all of them|everything|them] [among|between|over|to] {{m}} {PEOPLE}. How many [{{x}} |][are there for each|does each get|go to each|does one get|come to each]?", "s+t; #/m"),
    (f"[out of|of|from] {{s}} {{x}} {{t}} {GONE}[,| and| and so] the [rest|others|remaining ones|good ones] [are|get] [planted|put|packed|set|sorted|placed|laid|shared] [into|in|among] {{m}} [equal |]{{g}}. How many [{{x}} |]are [in one|in each|in every one]?", "s-t; #/m"),
    (f"{{s}} {{x}} [arrive|come|are there], {{t}} [of them |]{GONE}. The [rest|others] [fill|make|stand in|go into|form] {{m}} [equal |]{{g}}. How many [{{x}} |][are in one|are in each|has each|go into each]?", "s-t; #/m"),
    (f"[a|the|an empty] {{x1}} {IS} {{a}} {UNIT}[ empty| alone| at first|]. {{m}} {{y}} of {{p}} [{UNIT}|] [each |]{ADDED}. {AMOUNT}", "p*m; a+#"),
    (f"{{N}} [has|knows|owns|counts|has done|has written] {{a}} {{x}} [already|so far|before]. [In|On each of|For] {{m}} [days|weeks|hours|months] {{he}} {DOES} {{p}} [a day|a week|more|each time]. {STAY}", "p*m; a+#"),
    (f"[the|a] {{x1}} has {{a}} [places|seats|rooms|beds|tables|pages|chairs]. {{m}} {PEOPLE} [come|take part|sit down] [with|of] {{p}} [people|guests|children|pupils] [each|]. How many [places|seats|rooms|beds|chairs] [are empty|remain|remain empty|are left|are free|are not used]?", "p*m; a-#"),
    (f"{{N}} [needs|wants|has to {DO}|must {DO}] {{a}} {{x}}. {{m}} [days|weeks|times|hours] {{he}} {DOES} {{p}}. How many [{{x}} |][are missing|are still missing|are still needed|are left to do|remain|more does {{he}} need]?", "p*m; a-#"),
    (f"[a|the] [way|book|job|tour|route|list|path|wall|project] has {{a}} {UNIT} [of {{x}} |]and {{b}} [{UNIT} |][of {{y}}|]. {{N}} has [done|finished|made|walked|read|painted] {{m}} [parts|days|stages|pieces|stretches] of {{p}}. How [much|many] [is|are] [left|ahead|still to do|missing|ahead of {{him}}]?", "a+b; p*m; #1-#2"),
    ("[the|a|{N}'s] [play|{x1}|lesson|game|training|film|evening|course|match] has {m} [parts|scenes|laps|rounds|lessons|songs|chapters|halves] of {p} minutes[ each|]. [A|The] [break|pause|rest|talk|speech|walk|film] of {q} minutes [comes on top|is added|follows|comes between]. How [long|many minutes] [is it|does it last|does the whole take|is the evening|does everything take]?", "p*m; #+q"),
    (f"{{N}} {DOES} {{p}} {{x}} [an hour|a day|a week|a minute|per month] and [sells|uses|loses|breaks|eats|gives away|ships|throws out] {{s}} [an hour|a day|of them|in the same time|]. How many {{x}} [pile up|are left|stay|come together|are there|does {{he}} have] [in|after] {{m}} [hours|days|weeks|months]?", "p-s; #*m"),
    (f"{{N}} {DOES} {{s}} {{x}} [an hour|a day|a week|per month], {{M}} {{t}}. How many [{{x}} |][do both {DO}|is that|do they {DO}] in {{m}} [hours|days|weeks|months]?", "s+t; #*m"),
    (f"[a menu|the list|a shop|the kiosk|a stand|{{place}}] [offers|has|sells] [a|one] {{x1}} for {{s}} {{money}} and [a|one] {{y1}} for {{t}} [{{money}}|]. {{m}} {PEOPLE} [order|buy|take|want|choose|have] both. [What is the [bill|total|sum]|How much [is that|do they pay]|What do they pay|What does it cost] {SUM}?", "s+t; #*m"),
    (f"{{N}} {DOES} {{a}} {{x}} [in spring|in the morning|first|on {{D}}|at home|in {{D}}] and {{b}} [in summer|at night|later|on {{E}}|at school|in {{E}}]. {{c}} [of them |]{GONE}. {STAY}", "a+b; #-c"),
    (f"{{N}} [gives|gave|makes|made|yields|has] {{a}} {UNIT} of {{x1}} in {{D}} and {{b}} in {{E}}. {{M}} [eats|ate|uses|used|takes|took|sells|sold|drinks|drank] {{c}}. [How much {{x1}} is [left|there|still there|there still]|What is left|How much is left]?", "a+b; #-c"),
    (f"{{N}} {DOES} {{a}} {{x}}, {{b}} [of them |]{GONE}, {{c}} [others|more|new ones] [come|come in|join|are added|return|get on|come back]. {STAY}", "a-b; #+c"),
    ("[a|the] [bus|train|boat|lift|plane|tram|ship|van] [carries|has|takes|starts with|leaves with] {a} {x}[,|.] {b} [get off|leave|are unloaded|get out] [in {place}|at {place}|] and {c} [get on|come aboard|are loaded|get in|are taken aboard]. How many {x} [ride on|are on board|drive on|are in it|go on|ride back]?", "a-b; #+c"),
    (f"[a|the] [choir|club|class|team|school|village|herd|band] has {{a}} [members|{{x}}|people|animals]. {{b}} [join|are born|come|return|move in], {{p}} [are ill|leave|move away|die|go], [and |]{{q}} [return|come back|join|are new]. How many [are there|has it|is that|come|are they] {WHEN}?", "a+b; #-p; #+q"),
    # money: what is had, paid, saved, and what is for what
    (f"{{N}} [has|had|owns|takes along|starts with] {{a}} {{money}} [in the purse|in {{his}} pocket|at first|] [and|. {{He}}|. Then {{he}}|, then {{he}}] [buys|bought|orders|gets|takes|pays for] {{m}} {{x}} [for|at] {{p}} {{money}} [each|apiece|a piece]. {MONEY_LEFT}", "p*m; a-#"),
    (f"{{N}} [has|had|owns] {{a}} {{money}} [and|. {{He}}|. On {{D}} {{he}}|, then {{he}}] {SELLS} {{m}} {{x}} [for|at] {{p}} {{money}} [each|apiece]. {MONEY_LEFT}", "p*m; a+#"),
    (f"{{N}} [has|had|owns|brought] {{a}} {{money}}[,| and|. {{He}}] {PAYS} {{b}} [{{money}} |]{FOR} {{x1}} and {{c}} [{{money}} |]{FOR} {{y1}}. {MONEY_LEFT}", "a-b; #-c"),
    (f"{{N}} [has|had|owns|brought] {{a}} {{money}}[,| and|. {{He}}] {PAYS} {{b}} [{{money}} |]{FOR} {{x1}}, {{c}} {FOR} {{y1}} and {{d}} {FOR} the {{g1}}. {MONEY_LEFT}", "a-b; #-c; #-d"),
    (f"{{N}} [has|had|owns] {{a}} {{money}}[,| and|. {{He}}] [earns|earned|gets|got|finds|found|wins|won] {{b}} [{{money}} |][for|with|from] {{x}} and {{c}} [{{money}} |][for|with|from] {{y}}. {MONEY_LEFT}", "a+b; #+c"),
    (f"{{N}} [has|had|owns] {{a}} {{money}}[,| and|. {{He}}] [earns|earned|gets|got] {{b}} [{{money}} |][for|with|from] {{x}} and {PAYS} {{c}} [{{money}} |]{FOR} {{y1}}. {MONEY_LEFT}", "a+b; #-c"),
    (f"{{N}} {PAYS} {{b}} [{{money}} |]{FOR} {{x1}} and {{c}} [{{money}} |]{FOR} {{y1}}. {PAID}", "b+c"),
    (f"{{N}} {PAYS} {{b}} [{{money}} |]{FOR} {{x1}}, {{c}} {FOR} {{y1}} and {{d}} {FOR} the {{g1}}. {PAID}", "b+c; #+d"),
    (f"{{N}} [orders|ordered|buys|bought|takes|books|rents] {{m}} {{x}} [for|at] {{p}} {{money}} [each|apiece|a piece|per {{x1}}] and [pays|paid|gives|adds|spends] {{q}} [{{money}} |][more |]{FEE}. {PAID}", "p*m; #+q"),
    (f"{{N}} [orders|ordered|buys|bought|takes|books|rents] {{m}} {{x}} [for|at] {{p}} {{money}} [each|apiece|a piece|per {{x1}}]. {FEE_IS}. {PAID}", "p*m; #+q"),
    (f"{{N}} [orders|ordered|buys|bought|takes] {{m}} {{x}} [for|at] {{p}} {{money}} [each|apiece|a piece] and [gets|has|shows|uses] a [voucher|coupon|discount|reduction] of {{q}} {{money}}. {PAID}", "p*m; #-q"),
    (f"{{N}} [saves|earns|puts aside|gets|keeps|collects|makes] {{p}} {{money}} {EVERY}. After {{m}} [months|weeks|days|years|hours] {{he}} [buys a {{x1}} for|spends|pays|gives away|loses] {{q}} {{money}}[ for {{y}}|]. {MONEY_LEFT}", "p*m; #-q"),
    (f"{{N}} [saves|earns|puts aside|gets|keeps|collects|makes] {{p}} {{money}} {EVERY}. After {{m}} [months|weeks|days|years|hours] {{he}} [gets|finds|is given|wins|receives] {{q}} {{money}} [more|as a present]. {MONEY_LEFT}", "p*m; #+q"),
    (f"{{N}} [saves|earns|puts aside|gets] {{p}} {{money}} {EVERY} and [pays|spends|loses] {{s}} {EVERY}. {MONEY_AFTER}", "p-s; #*m"),
    (f"{{N}} [saves|earns|puts aside|gets|spends|pays] {{p}} {{money}} {EVERY}. How much is that in {{m}} [months|weeks|days|years]?", "p*m"),
    # one verb for two numbers
    (f"{{N}} [has|had|carries|starts with|owns] {{a}} {{x}}[ in the {{g1}}|]. {{He}} {LOSES} {{b}} {SOMEWHERE} and {{c}} {ELSEWHERE}. {STAY}", "a-b; #-c"),
    (f"{{N}} [has|had|carries|starts with|owns] {{a}} {{x}}[ in the {{g1}}|]. {{He}} {GAINS} {{b}} {SOMEWHERE} and {{c}} {ELSEWHERE}. {STAY}", "a+b; #+c"),
    (f"{{N}} [has|had|carries|starts with|owns] {{a}} {{x}}[ in the {{g1}}|]. {{He}} {GAINS} {{b}} {SOMEWHERE} and {LOSES} {{c}} {ELSEWHERE}. {STAY}", "a+b; #-c"),
    (f"{{N}} [has|had|carries|starts with|owns] {{a}} {{x}}[ in the {{g1}}|]. {{He}} {LOSES} {{b}} {SOMEWHERE} and {GAINS} {{c}} {ELSEWHERE}. {STAY}", "a-b; #+c"),
    (f"{{N}} [has|had|carries|starts with|owns] {{a}} {{x}}[ in the {{g1}}|]. {{He}} {LOSES} {{b}} {SOMEWHERE}, {{c}} {ELSEWHERE} and {{d}} at the end. {STAY}", "a-b; #-c; #-d"),
    (f"{{N}} {GAINS} {{a}} {{x}} {SOMEWHERE} and {{b}} {ELSEWHERE}. {{He}} {LOSES} {{c}} [of them |]. {STAY}", "a+b; #-c"),
    (f"{{N}} {GAINS} {{a}} {{x}} {SOMEWHERE} and {{b}} {ELSEWHERE}. {{He}} {LOSES} {{c}} [of them |]{SOMEWHERE} and {{d}} {ELSEWHERE}. {STAY}", "a+b; #-c; #-d"),
    (f"{{N}} {GAINS} {{a}} {{x}} {SOMEWHERE}, {{b}} {ELSEWHERE} and {{c}} at the end. {HOW}", "a+b; #+c"),
]
OPENINGS = (
    "owns/owned|loads/loaded|types/typed|writes/wrote|bakes/baked|collects/collected|finds/found|saves/saved|carries/carried|draws/drew|"
    "picks/picked|plants/planted|gets/got|makes/made|knows/knew|reads/read|brings/brought|shows/showed|stores/stored"
)
DEBT_OPENING = "{N} [owes/owed] [{M} |the bank |]{a} {money}"
DEBT_LESS = "pays back/paid back;{v}|gives back/gave back;{v}|pays off/paid off;{v}|returns/returned;{v}|repays/repaid;{v}"
DEBT_MORE = "borrows/borrowed;{v} more|borrows/borrowed;another {v}|is lent/was lent;{v} more|takes/took;{v} more as a loan|gets/got;a loan of {v} more"
DEBT_END = "[How many {money} does {he} [still |]owe|How much does {he} [still |]owe|How much is {his} debt|How big is {his} debt] [now|then|in the end|]?"
GAIN_VERBS = (
    "loads/loaded;{v} more|hires/hired;{v} more|plants/planted;{v} more|paints/painted;{v} more|bakes/baked;{v} more|catches/caught;{v} more|"
    "saves/saved;{v} more|grows/grew;{v} more|draws/drew;{v} more|writes/wrote;{v} more|types/typed;{v} more|prints/printed;{v} more|picks/picked;{v} more|"
    "rents/rented;{v} more|gains/gained;{v}|takes in/took in;{v}|takes/took;{v} [others|more] [on board|along|aboard|back]|harvests/harvested;{v}|"
    "knits/knitted;{v} more|gets back/got back;{v}|invites/invited;{v} more|unpacks/unpacked;{v} more|carves/carved;{v} more|sews/sewed;{v} more|"
    "pours in/poured in;{v}|puts in/put in;{v}|puts back/put back;{v}|lays/laid;{v} more|welcomes/welcomed;{v} more|learns/learned;{v} more|"
    "stores/stored;{v} more|imports/imported;{v}|digs up/dug up;{v}|fills in/filled in;{v}|is sent/was sent;{v} more|is lent/was lent;{v}|types/typed;{v} again"
)
LOSS_VERBS = (
    "unloads/unloaded;{v}[ in {place}|]|deletes/deleted;{v}|erases/erased;{v}|cuts off/cut off;{v}|cuts out/cut out;{v}|eats/ate;{v}|drinks/drank;{v}|"
    "pays/paid;{v}[ for {y}| to {M}| for a {y1}|]|ships/shipped;{v}|exports/exported;{v}|fires/fired;{v}|crosses out/crossed out;{v}|tears up/tore up;{v}|"
    "spoils/spoiled;{v}|serves/served;{v}|gives back/gave back;{v}|cancels/cancelled;{v}|mails/mailed;{v}|posts/posted;{v}|releases/released;{v}|"
    "scraps/scrapped;{v}|recycles/recycled;{v}|pours out/poured out;{v}|spills/spilled;{v}|wastes/wasted;{v}|hands in/handed in;{v}|cuts down/cut down;{v}|"
    "pulls out/pulled out;{v}|takes out/took out;{v}|sends back/sent back;{v}|sends home/sent home;{v}|sets free/set free;{v}|feeds/fed;{v} to {M}|"
    "lays/laid;{v} aside|gives up/gave up;{v}|closes/closed;{v}|melts/melted;{v}|delivers/delivered;{v}[ to {M}|]|damages/damaged;{v}|pays/paid;{v} for repairs"
)
GAIN_EVENTS = (
    "{v} [more |others |][join|come in|come back|return|get on|enter|are born|grow|hatch|are loaded|are put in|are put on|are poured in|"
    "are written|are found|land|park|show up|are typed|are taken aboard|check in|sign up|move in|are hired|grow back]"
)
LOSS_EVENTS = "{v}[ of them|] " + GONE
