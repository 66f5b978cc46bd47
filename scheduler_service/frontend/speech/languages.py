"""Whisper's languages by English name, which a request may contain instead of the code."""

_NAMES = """
en=english zh=chinese|mandarin de=german es=spanish|castilian ru=russian ko=korean fr=french ja=japanese
pt=portuguese tr=turkish pl=polish ca=catalan|valencian nl=dutch|flemish ar=arabic sv=swedish it=italian
id=indonesian hi=hindi fi=finnish vi=vietnamese he=hebrew uk=ukrainian el=greek ms=malay cs=czech
ro=romanian|moldavian|moldovan da=danish hu=hungarian ta=tamil no=norwegian th=thai ur=urdu hr=croatian
bg=bulgarian lt=lithuanian la=latin mi=maori ml=malayalam cy=welsh sk=slovak te=telugu fa=persian lv=latvian
bn=bengali sr=serbian az=azerbaijani sl=slovenian kn=kannada et=estonian mk=macedonian br=breton eu=basque
is=icelandic hy=armenian ne=nepali mn=mongolian bs=bosnian kk=kazakh sq=albanian sw=swahili gl=galician
mr=marathi pa=punjabi|panjabi si=sinhala|sinhalese km=khmer sn=shona yo=yoruba so=somali af=afrikaans
oc=occitan ka=georgian be=belarusian tg=tajik sd=sindhi gu=gujarati am=amharic yi=yiddish lo=lao uz=uzbek
fo=faroese ht=haitian_creole|haitian ps=pashto|pushto tk=turkmen nn=nynorsk mt=maltese sa=sanskrit
lb=luxembourgish|letzeburgesch my=myanmar|burmese bo=tibetan tl=tagalog mg=malagasy as=assamese tt=tatar
haw=hawaiian ln=lingala ha=hausa ba=bashkir jw=javanese su=sundanese yue=cantonese
"""
"""Language codes, each with its names; "_" stands for a space."""

CODES = {
    name.replace("_", " "): code
    for code, _, names in (entry.partition("=") for entry in _NAMES.split())
    for name in names.split("|")
}


def code_of(language: str) -> str:
    """The code of a language, given its name or code in upper or lower case."""
    words = " ".join(language.lower().split())
    return CODES.get(words, words)
