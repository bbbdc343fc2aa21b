"""Countries and their capitals, and other cities for the tools."""

from __future__ import annotations

from demo.generator.wording import phrases

_TABLE = """
Afghanistan:Kabul Albania:Tirana Algeria:Algiers Angola:Luanda Argentina:Buenos_Aires
Armenia:Yerevan Australia:Canberra Austria:Vienna Bahrain:Manama Bangladesh:Dhaka Belarus:Minsk
Belgium:Brussels Bolivia:Sucre Brazil:Brasilia Bulgaria:Sofia Cambodia:Phnom_Penh
Cameroon:Yaounde Canada:Ottawa Chile:Santiago China:Beijing Colombia:Bogota Croatia:Zagreb
Cuba:Havana Cyprus:Nicosia Denmark:Copenhagen Ecuador:Quito Egypt:Cairo Estonia:Tallinn
Ethiopia:Addis_Ababa Finland:Helsinki France:Paris Georgia:Tbilisi Germany:Berlin Ghana:Accra
Greece:Athens Haiti:Port-au-Prince Honduras:Tegucigalpa Hungary:Budapest Iceland:Reykjavik
India:New_Delhi Indonesia:Jakarta Iran:Tehran Iraq:Baghdad Ireland:Dublin Israel:Jerusalem
Italy:Rome Jamaica:Kingston Japan:Tokyo Jordan:Amman Kazakhstan:Astana Kenya:Nairobi
Kuwait:Kuwait_City Laos:Vientiane Latvia:Riga Lebanon:Beirut Libya:Tripoli Lithuania:Vilnius
Madagascar:Antananarivo Malaysia:Kuala_Lumpur Mali:Bamako Malta:Valletta Mexico:Mexico_City
Mongolia:Ulaanbaatar Morocco:Rabat Mozambique:Maputo Nepal:Kathmandu Nicaragua:Managua
Nigeria:Abuja Norway:Oslo Oman:Muscat Pakistan:Islamabad Panama:Panama_City Paraguay:Asuncion
Peru:Lima Philippines:Manila Poland:Warsaw Portugal:Lisbon Qatar:Doha Romania:Bucharest
Russia:Moscow Rwanda:Kigali Senegal:Dakar Serbia:Belgrade Singapore:Singapore Slovakia:Bratislava
Slovenia:Ljubljana Somalia:Mogadishu South_Africa:Pretoria South_Korea:Seoul Spain:Madrid
Sudan:Khartoum Sweden:Stockholm Switzerland:Bern Syria:Damascus Taiwan:Taipei Tanzania:Dodoma
Thailand:Bangkok Tunisia:Tunis Turkey:Ankara Uganda:Kampala Ukraine:Kyiv United_Kingdom:London
Uruguay:Montevideo Venezuela:Caracas Vietnam:Hanoi Yemen:Sanaa Zambia:Lusaka Zimbabwe:Harare
"""

CAPITALS: dict[str, str] = {
    country.replace("_", " "): city.replace("_", " ")
    for country, city in (entry.split(":") for entry in _TABLE.split())
}

_MORE_CITIES = """
Amsterdam Atlanta Auckland Barcelona Boston Bristol Calgary Chicago Cologne Dallas Denver Dresden
Dubai Dundee Edinburgh Florence Frankfurt Geneva Genoa Glasgow Hamburg Hanover Houston Istanbul
Karachi Kolkata Krakow Lagos Leeds Leipzig Liverpool Lyon Manchester Marseille Melbourne Miami
Milan Montreal Mumbai Munich Naples Nice Osaka Perth Phoenix Porto Prague Quebec Rotterdam
Salzburg Seattle Seville Shanghai Stuttgart Sydney Toronto Toulouse Turin Valencia Vancouver
Venice Zurich
"""

CITIES: tuple[str, ...] = tuple(sorted({*CAPITALS.values(), *_MORE_CITIES.split()}))

UNKNOWN_LANDS: tuple[str, ...] = phrases("""
Atlantis | Narnia | Mordor | Wakanda | Oz | Utopia | Gondor | Lilliput | Neverland | Wonderland |
Rohan | Westeros | Genovia | Ruritania | El Dorado | Shangri-La | Camelot | Avalon | Hyrule |
Krypton | Mars | the Moon | Jupiter | the ocean | Freedonia
""")  # fmt: skip
