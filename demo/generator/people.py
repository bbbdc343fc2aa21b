"""First names, for those who greet, who ask and who are asked about."""

from __future__ import annotations

from demo.generator.wording import words

NAMES: tuple[str, ...] = words("""
Ada Adam Alice Amir Ana Anna Ben Boris Carla Carlos Chen Clara Daniel David Diana Elena Emma Eric
Eva Felix Fatima Frank George Grace Hana Hannah Henry Hugo Ida Igor Ines Ivan Jack Jane Jasper
Joan John Jonas Julia Karim Kate Kenji Laura Lea Leo Lena Liam Lily Lin Lisa Lucas Lucy Luis Maria
Mark Marta Max Maya Mei Mia Mila Mina Mohammed Nadia Nina Noah Nora Oliver Omar Oscar Otto Paul
Pedro Peter Priya Rania Raj Rita Robert Rosa Ruth Sam Samir Sara Sofia Sophie Stefan Susan Tara
Theo Tim Tom Uma Vera Victor Wei William Xena Yara Yusuf Zara Zoe
""")  # fmt: skip

BOT_NAMES: tuple[str, ...] = words("""
Ember Pixel Robo Nova Atlas Echo Iris Juno Sage Willow Cosmo Dot Gizmo Hal Jarvis Kiwi Luna Max
Nimbus Orion Pip Quill Ruby Sunny Tango Vega Ziggy Bolt Clover Daisy Ava Marvin Olive Pepper Rex
""")  # fmt: skip
