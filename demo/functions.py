"""Functions to call and objects to write as JSON, with their wordings.

Owns these tables and the words that fill them. A wording has slots by kind: {city}, {item}, {n} (a number), {say} (a
sentence), ...; the arguments of a call and the values of an object are what fills them. The last wording of each is kept
for the evaluation. Knows nothing of how chats are made of them.
"""

from typing import NamedTuple

CITIES = (
    "Oslo Paris Rome Lima Cairo Delhi Tokyo Berlin Madrid Vienna Prague Dublin Athens Lisbon Warsaw Geneva Boston Denver "
    "Quito Havana Accra Nairobi Seoul Hanoi Perth Sydney Toronto Bern Riga Sofia Tunis Malta Porto Milan Lyon Ghent"
).split()
NAMES_OF_FILES = "notes.txt report.pdf photo.png data.csv todo.md main.py letter.doc song.mp3 plan.txt old.log budget.xls".split()
PEOPLE = (
    "Aaron Abby Agnes Alan Albert Alex Alice Alicia Amelia Amir Amy Andrea Andrew Angela Anita Anna Anne Anthony Aria Arthur Barbara Beth Bill Bob Boris "
    "Brian Carl Carmen Carol Charles Charlotte Chen Chris Claire Daniel Dave Deborah Denis Diana Diego Donna Edward Elena Eli Elizabeth Ethan Evelyn "
    "Francis Frank Fred Gary George Gina Gloria Grace Harry Heidi Henry Hiro Howard Isaac Isabel Jake James Jane Jason Jean Jeff Jenny Jim Joan Joe John "
    "Jose Joseph Joyce Juan Judy Kate Keith Ken Kevin Larry Laura Lee Leon Linda Lisa Louis Luca Maria Mark Martha Martin Mary Matt Megan Michael Mike "
    "Molly Monica Nancy Nathan Nick Nicole Oliver Oscar Pablo Pamela Patrick Pedro Phil Rachel Ralph Ray Rebecca Richard Rob Roger Rose Roy Ryan Sally "
    "Samuel Sandra Scott Sean Sheila Steve Sue Susan Tanya Teresa Tim Tony Tyler Ursula Vincent Walter Wendy Yoko Yuki Zara"
).split()
SKIES = "sunny cloudy rainy windy foggy stormy dry clear".split()
SENTENCES = (
    "the bus is late|dinner is ready|the meeting is at noon|the key is under the mat|the shop is closed today|"
    "we need more bread|I am at home|the cat is hungry|the light is on|you can come at six|my car is broken|the test was easy|the plan has changed|"
    "we won the game|it will rain|the soup is hot|nobody is here|the game starts soon|the door is open|the train has left|the parcel is here"
).split("|")
COLOURS = "red green blue yellow white orange pink purple".split()
LANGUAGES = "German French Spanish Italian Dutch Latin Greek Polish".split()
ROOMS = "kitchen|bathroom|hall|bedroom|office|garage|living room|cellar".split("|")
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
EVENTS = "party|meeting|concert|dinner|exam|wedding|lesson|game|trip|walk|visit|test|dance|talk|show|picnic".split("|")
MONIES = "dollars euros pounds francs yen crowns".split()
GOOD = {"positive": "great good lovely wonderful perfect fine".split(), "negative": "bad terrible broken awful useless poor".split()}
FEEL = {"positive": "happy pleased glad delighted".split(), "negative": "angry unhappy sad disappointed".split()}


class Tool(NamedTuple):
    """A function: name variants, description, parameters (name variants, slot of the value), and wordings."""

    names: str
    does: str
    parameters: tuple[tuple[str, str], ...]
    asks: str
    result: str
    answer: str


TOOLS = [
    Tool(
        "get_weather|weather|current_weather", "Get the weather in a city.", (("city|location|place", "city"),),
        "What is the weather in {city}?|{city} weather|Weather in {city}, please.|What will the weather be like in {city}?|I am going to {city}. How is the weather there?|Do I need a coat in {city}?|How is the weather in {city} today?|Is it warm in {city}?|"
        "Tell me the weather in {city}.|What weather do they have in {city}?",
        '{{"degrees": {r}, "sky": "{sky}"}}', "In {city} it is {r} degrees and {sky}.",
    ),
    Tool(
        "get_time|clock|local_time", "Get the local time of a city.", (("city|place|location", "city"),),
        "What time is it in {city}?|time in {city}|Current time in {city}?|What is the local time in {city}?|I need the time in {city}.|Tell me the time in {city}.|How late is it in {city}?|What does the clock say in {city}?",
        "{h}:{r2}", "It is {h}:{r2} in {city}.",
    ),
    Tool(
        "get_price|price_of|look_up_price", "Get the price of a thing in dollars.", (("item|product|thing", "item"),),
        "What does a {item} cost?|price of {item}|What is the price of the {item}?|Is the {item} expensive?|Give me the price of {item}.|How much is a {item}?|Look up the price of a {item}.|What do I pay for a {item}?",
        "{r}", "A {item} costs {r} dollars.",
    ),
    Tool(
        "count_stock|in_stock|stock", "Count how many of a thing are in the store.", (("item|name|product", "item"),),
        "How many of the {item} are in stock?|stock of {item}|How many {item} do we have?|Is there any {item} left?|Check the stock of the {item}.|Do we still have the {item}?|"
        "What is left of the {item} in the store?",
        "{r}", "There are {r} in stock.",
    ),
    Tool(
        "add|sum|plus", "Add two numbers.", (("a|x|first", "n"), ("b|y|second", "k")),
        "Use a tool to add {n} and {k}.|Add up {n} and {k} with the function.|{n} + {k}, use the tool.|Use the function to compute {n} + {k}.|What is the sum of {n} and {k}? Use a tool.|Let the tool compute {n} + {k}.|Call the function for {n} plus {k}.",
        "{sum}", "The result is {sum}.",
    ),
    Tool(
        "send_message|tell|message", "Send a message to a person.", (("to|person|name", "person"), ("text|message", "say")),
        "Tell {person} that {say}.|Message {person}: {say}|Text {person} that {say}.|I want {person} to know that {say}.|Drop {person} a line: {say}|Send this to {person}: {say}|Send {person} a message: {say}.|Write to {person} that {say}.|Let {person} know that {say}.",
        "sent", "I have told {person}.",
    ),
    Tool(
        "set_timer|timer|start_timer", "Start a timer.", (("minutes|length", "n"),),
        "Set a timer of {n} minutes.|timer {n} minutes|I want a timer for {n} minutes.|Tell me when {n} minutes are over.|Timer, {n} minutes.|Ring in {n} minutes.|Start a timer for {n} minutes.|Wake me in {n} minutes.|Give me a timer of {n} minutes.",
        "started", "The timer is set to {n} minutes.",
    ),
    Tool(
        "book_table|reserve|book", "Book a table in a city.", (("city|where", "city"), ("people|guests|seats", "n")),
        "Book a table for {n} people in {city}.|I need a table for {n} in {city}.|A table in {city} for {n} people, please.|Find us a table for {n} in {city}.|Table for {n}, {city}.|We want to have dinner in {city}, {n} of us.|Reserve a table in {city} for {n}.|We are {n} and want to eat in {city}.",
        '{{"number": {r}}}', "Your table in {city} has number {r}.",
    ),
    Tool(
        "convert_currency|exchange|convert", "Convert an amount of money into another currency.",
        (("amount|value", "n"), ("source|from_currency|from", "money"), ("target|to_currency|to", "money2")),
        "Convert {n} {money} to {money2}.|How much are {n} {money} in {money2}?|What do I get in {money2} for {n} {money}?|Change {n} {money} into {money2}.|"
        "I have {n} {money}. What is that in {money2}?",
        "{r}", "That is {r} {money2}.",
    ),
    Tool(
        "search|web_search|find|look_up", "Search for pages about a topic.", (("query|q|topic|text", "phrase"),),
        "Search for {phrase}.|Find pages about {phrase}.|Look up {phrase}.|Search: {phrase}|Google {phrase}.|I want to know more about {phrase}.|Search the internet for {phrase}.|Find something about the {phrase}.|Look up {phrase} for me.|What can you find about the {phrase}?|Search the web for {phrase}.",
        "{r} pages found", "I found {r} pages.",
    ),
    Tool(
        "add_to_list|shopping_list|note|add_item", "Add things to the shopping list.", (("items|things|products", "list"),),
        "Put {list} on my shopping list.|I need {list}.|Add {list} to the list.|Please note that we need {list}.|Do not forget {list}.",
        "ok", "It is on the list.",
    ),
    Tool(
        "create_event|add_event|schedule", "Create an event in the calendar.", (("title|name|what", "event"), ("day|date|when", "day")),
        "Put the {event} in my calendar for {day}.|Schedule a {event} on {day}.|I have a {event} on {day}, note it.|On {day} there is a {event}. Add it.|"
        "Plan the {event} for {day}.",
        "created", "The {event} is planned for {day}.",
    ),
    Tool(
        "set_light|light|switch_light", "Set the light in a room.", (("room|where", "room"), ("colour|color", "colour")),
        "Make the light in the {room} {colour}.|Set the {room} light to {colour}.|Turn the light {colour} in the {room}.|I want {colour} light in the {room}.",
        "done", "The light in the {room} is {colour} now.",
    ),
    Tool(
        "set_temperature|heat|thermostat", "Set the temperature of a room.", (("room|place", "room"), ("degrees|temperature|target", "r")),
        "Heat the {room} to {r} degrees.|Set the {room} to {r} degrees.|I want {r} degrees in the {room}.|Make it {r} degrees in the {room}.",
        "done", "The {room} is set to {r} degrees.",
    ),
    Tool(
        "play_music|play|play_song", "Play music.", (("song|title|track", "event"), ("volume|loudness", "n")),
        "Play {event} at volume {n}.|I want to hear {event}, volume {n}.|Start the song {event} with volume {n}.|Put on {event}. Volume {n}, please.",
        "playing", "Now playing {event}.",
    ),
    Tool(
        "route|get_route|directions|distance", "Get the distance between two cities.", (("start|origin|from", "city"), ("end|destination|to", "city2")),
        "How far is it from {city} to {city2}?|Get me from {city} to {city2}.|What is the distance between {city} and {city2}?|Show the way from {city} to {city2}.|"
        "I want to drive from {city} to {city2}.",
        "{r} km", "From {city} to {city2} it is {r} km.",
    ),
    Tool(
        "order|order_item|buy", "Order things in the shop.", (("item|product|article", "item"), ("count|quantity|amount", "n")),
        "Order {n} of the {item}.|Buy {n} {item} packs.|I would like to order {n} times {item}.|Get me {n} of {item}.|Please order {item}, quantity {n}.",
        "ordered", "I have ordered {n} of the {item}.",
    ),
    Tool(
        "get_user|find_user|lookup_user", "Find a user by name.", (("name|user|username", "person"),),
        "Find the user {person}.|Who is {person}?|Look up {person}.|Get the data of {person}.|Is {person} a user here?",
        '{{"name": "{person}", "age": {r}}}', "{person} is {r} years old.",
    ),
    Tool(
        "multiply|times|product", "Multiply two numbers.", (("a|x|first", "n"), ("b|y|second", "k")),
        "Use a tool to multiply {n} by {k}.|Let the tool compute {n} times {k}.|What is {n} times {k}? Use the function.|Multiply {n} and {k} with a tool.",
        "{product}", "The result is {product}.",
    ),
    Tool(
        "translate|translate_text|to_language", "Translate a text into a language.", (("text|sentence|phrase", "say"), ("language|target|to", "language")),
        "Translate '{say}' into {language}.|What is '{say}' in {language}?|How do you say '{say}' in {language}?|Put '{say}' into {language}.",
        "done", "Here is the text in {language}.",
    ),
    Tool(
        "remember|save_note|store", "Save a note under a title.", (("title|key|name", "item"), ("content|text|value", "say")),
        "Save a note '{item}': {say}.|Remember under {item} that {say}.|Write down that {say}, title {item}.|Note '{item}' should say that {say}.",
        "saved", "I have saved the note.",
    ),
    Tool(
        "delete_file|remove_file|erase", "Delete a file.", (("path|file|filename", "file"),),
        "Delete {file}.|Remove the file {file}.|Erase {file}, please.|I do not need {file} any more, delete it.",
        "deleted", "The file {file} is gone.",
    ),
    Tool(
        "read_file|open_file|cat", "Read a file.", (("path|file|filename", "file"),),
        "Read {file}.|What is in {file}?|Open the file {file}.|Print {file}.|Let me see what {file} says.",
        "{say}", "The file says: {say}.",
    ),
    Tool(
        "send_email|email|mail", "Send an email.", (("to|recipient|address", "mail"), ("subject|title", "event")),
        "Send an email to {mail} about the {event}.|Mail {mail}, subject {event}.|Write an email with the subject {event} to {mail}.|Let {mail} know about the {event} by email.",
        "sent", "The email to {mail} is sent.",
    ),
]  # fmt: skip


class Record(NamedTuple):
    """An object: keys (name variants, slot of the value), and sentences that state the values."""

    keys: tuple[tuple[str, str], ...]
    texts: str


RECORDS = [
    Record(
        (("name|person|who", "person"), ("age|years", "n")),
        "{person} is {n} years old.|{person} has turned {n}.|The age of {person} is {n}.|At {n}, {person} is the oldest.",
    ),
    Record(
        (("item|product|thing", "item"), ("price|dollars|cost", "n")),
        "A {item} costs {n} dollars.|The price of a {item} is {n} dollars.|For a {item} you pay {n} dollars.",
    ),
    Record(
        (("name|person", "person"), ("city|home|place", "city")),
        "{person} lives in {city}.|The home of {person} is {city}.|{person} has moved to {city}.|In {city} you can meet {person}.",
    ),
    Record(
        (("city|place", "city"), ("degrees|temperature", "n"), ("sky|weather", "sky")),
        "In {city} it is {n} degrees and {sky}.|It is {sky} in {city}, at {n} degrees.|{city}: {n} degrees, {sky}.",
    ),
    Record(
        (("item|what", "item"), ("count|number", "n"), ("owner|person", "person")),
        "{person} has {n} of the {item}.|{n} of the {item} belong to {person}.|Of the {item}, {person} owns {n}.",
    ),
    Record(
        (("name|person|full_name", "person"), ("age|years", "n"), ("city|home|town", "city")),
        "{person} is {n} years old and lives in {city}.|{person}, {n}, is from {city}.|{n}-year-old {person} lives in {city}.|My name is {person}, I am {n} and come from {city}.|"
        "From {city} comes {person}, aged {n}.",
    ),
    Record(
        (("name|user|username", "person"), ("email|mail|address", "mail")),
        "{person} can be reached at {mail}.|Write to {person} at {mail}.|The address of {person} is {mail}.|{person} <{mail}>|Contact: {person}, {mail}.",
    ),
    Record(
        (("product|item|article", "item"), ("price|cost|amount", "price"), ("in_stock|available", "flag")),
        "The {item} costs {price} dollars and is {not}in stock.|{item}: {price} dollars, {not}available.|At {price} dollars the {item} is {not}to be had.|"
        "A {item} for {price} dollars is {not}there.",
    ),
    Record(
        (("title|event|what", "event"), ("day|date|when", "day"), ("guests|people|participants", "names")),
        "{names} go to the {event} on {day}.|On {day} there is a {event} with {names}.|{event} on {day}. With {names}.|The {event} is on {day}, and {names} will come.|"
        "Meet {names} at the {event} on {day}.",
    ),
    Record(
        (("sentiment|mood|feeling", "mood"),),
        "I am {feel} with the {item}.|The {item} is {good}.|What a {good} {item}!|My {item} was {good}, I am {feel}.|This {item} makes me {feel}.",
    ),
    Record(
        (("ingredients|things|items", "list"), ("minutes|time|duration", "n")),
        "Take {list} and cook for {n} minutes.|You need {list}, and it takes {n} minutes.|In {n} minutes it is made of {list}.|With {list} it is ready after {n} minutes.",
    ),
    Record(
        (("colour|color", "colour"), ("object|item|thing", "item")),
        "The {item} is {colour}.|I see a {colour} {item}.|A {colour} {item} lies there.|Bring me the {colour} {item}.|{colour} is the {item}.",
    ),
    Record(
        (("origin|from|start", "city"), ("destination|to|end", "city2"), ("day|date", "day"), ("passengers|people|seats", "n")),
        "{n} people fly from {city} to {city2} on {day}.|A flight from {city} to {city2} for {n} on {day}.|On {day} we go from {city} to {city2}, {n} of us.|"
        "Book {n} seats from {city} to {city2} for {day}.|We are {n} and leave {city} for {city2} on {day}.",
    ),
    Record(
        (("answer|result|number", "n"),),
        "The answer is {n}.|It must be {n}.|The result was {n}.|We get {n}.|In the end it is {n}.",
    ),
]
