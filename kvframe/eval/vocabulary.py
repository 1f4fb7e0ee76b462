"""The words of the retrieval tasks: keys that are asked for, and values that are common words."""

_KEYS = """
anchor badger bakery barley beacon blanket blossom bonfire bottle bridge buffalo candle canyon carpet cathedral
cello cherry chimney cinnamon clover compass copper coral cottage cricket daisy dolphin dragon eagle ember falcon
feather ferry fiddle forest fountain ginger glacier goblet granite hammer harbor harvest hazel hedgehog helmet heron
island ivory jacket jasmine kettle ladder lagoon lantern lemon lighthouse lizard lobster magnet mango maple marble
meadow mirror mountain mustard nectar nutmeg oasis orchard otter oyster paddle panther parrot pebble pepper pigeon
pillow pirate planet pumpkin rabbit raven ribbon saddle saffron salmon sapphire scarf shovel silk sparrow squirrel
statue teapot thimble tiger timber trumpet tulip turtle umbrella valley velvet violin walnut whale willow window
wizard zebra
"""

_VALUES = """
apple baby ball bank bear bed bell bird blood boat body book bread brother cat chair child church city coffee cow
dance dinner dog door dream ear egg evening eye family farm father finger fire fish flower food foot game garden
girl glass gold grass hair hand head heart horse hospital hotel house ice king kitchen lake leaf letter milk money
moon morning mother music night ocean paper park picture queen rain river road rock school ship shoe sister sky snow
sugar summer sun table tea train tree village wall war water wedding wind winter wood
"""

KEYS = tuple(_KEYS.split())
VALUES = tuple(_VALUES.split())
