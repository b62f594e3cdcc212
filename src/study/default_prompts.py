"""Twelve prompts of our own in six categories, for trying a study without a prompt file.

They are few on purpose, so that a study on a laptop ends in minutes; conclusions want a real prompt set. Two
categories repeat their input (`summarise`, `rewrite`), two answer from it (`extract`) or continue it (`code`), and
two have little to look up (`explain`, `story`).
"""

from __future__ import annotations

_LIGHTHOUSE = (
    "The lighthouse on Gull Point was built in 1871, after three grain ships were lost on the reef in one winter. "
    "Its lamp burned rapeseed oil at first, and the keeper climbed the one hundred and twelve steps every four hours "
    "to trim the wick. In 1924 the lamp was replaced by an electric one, and in 1968 the last keeper, Ada Thorne, "
    "handed the keys to the harbour office. Today the lighthouse on Gull Point is a small museum. Visitors climb the "
    "one hundred and twelve steps, see the old rapeseed oil lamp, and read the log in which Ada Thorne noted every "
    "ship that passed between 1931 and 1968. The museum is open from April to October and is run by volunteers."
)
_ORCHARD = (
    "The town council of Marrow Hill voted on Tuesday to turn the old railway yard into a community orchard. The "
    "community orchard will hold two hundred apple, pear and plum trees, of which sixty are local varieties that are "
    "no longer sold. The old railway yard has stood empty since the freight line closed in 1994, and tests last year "
    "showed that its soil is clean enough for fruit. The council will pay for the fence and the water supply; the "
    "trees are a gift of the garden society. Planting begins in November, and every household in Marrow Hill may "
    "adopt one tree. Critics on the council had wanted a car park, but the vote was nine to four for the orchard."
)
_MINUTES = (
    "we met on monday to talk about the new bakery. sam said the oven is late and wont come before the tenth. lena "
    "said we can rent a oven for two weeks if the price is ok. sam will call the rental firm. the sign for the front "
    "window is ready and lena will pick it up on thursday. we also need a person for the early shift, lena knows "
    "somebody who might want it. next meeting is monday again."
)
_NOTICE = (
    "Dear residents, the lift in building C will be out of service from 3 March to 7 March. The lift in building C is "
    "being fitted with a new motor. Please use the stairs or the lift in building B. Deliveries to building C will be "
    "taken in at the front desk. If you need help with heavy shopping, call the front desk at any time. Thank you for "
    "your patience. The house management."
)
_TIMETABLE = (
    "Ferry timetable, summer. Ferry Heron: leaves Alder Quay at 07:15, 11:30 and 16:45, crossing time 40 minutes, 24 "
    "cars. Ferry Plover: leaves Alder Quay at 09:00 and 14:10, crossing time 55 minutes, 60 cars. Ferry Tern: leaves "
    "Alder Quay at 19:20, crossing time 40 minutes, foot passengers only. Bicycles travel free on the Heron and the "
    "Tern; on the Plover they cost two crowns."
)
_RECIPE = (
    "Barley soup for four. Soak 150 g of barley overnight. Fry one chopped onion, two diced carrots and a stalk of "
    "celery in two spoons of butter for eight minutes. Add the barley and 1.5 litres of stock and simmer for fifty "
    "minutes. Stir in 200 g of smoked trout, a spoon of lemon juice and plenty of dill. Serve at once, since the "
    "barley goes on swelling."
)
_STACK = '''class Stack:
    """A stack of numbers."""

    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
'''
_TOTALS = """def total_by_month(sales):
    totals = {}
    for sale in sales:
        month = sale["month"]
        if month in totals:
            totals[month] = totals[month] + sale["amount"]
        else:
            totals[month] = sale["amount"]
    return totals
"""

PACKAGED: tuple[tuple[str, str], ...] = (
    ("summarise", f"Summarise the following text in three sentences, keeping its wording.\n\n{_LIGHTHOUSE}"),
    ("rewrite", f"Correct spelling, capital letters and grammar in these minutes. Change nothing else.\n\n{_MINUTES}"),
    ("extract", f"{_TIMETABLE}\n\nList every ferry with its departure times and its crossing time."),
    ("code", f"Add a method `peek` that returns the top item without removing it. Show the class.\n\n{_STACK}"),
    ("explain", "Explain to a twelve-year-old why the moon seems to change its shape over a month."),
    ("story", "Write the opening of a story about a clockmaker who finds a letter inside a broken clock."),
    ("summarise", f"Summarise the following report for a newsletter, keeping names and numbers.\n\n{_ORCHARD}"),
    ("rewrite", f"Rewrite this notice for building D and for the dates 10 March to 14 March.\n\n{_NOTICE}"),
    ("extract", f"{_RECIPE}\n\nList the ingredients with their amounts, one a line."),
    ("code", f"Write the same function with `dict.get`, with a docstring and type hints.\n\n{_TOTALS}"),
    ("explain", "What is the difference between weather and climate? Give one example of each."),
    ("story", "Describe a night market in a harbour town as a traveller sees it for the first time."),
)
"""(category, text) pairs, the categories in turn."""
