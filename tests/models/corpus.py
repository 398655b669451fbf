"""Texts that tokenizers get wrong: what splits oddly, what is invisible, what is built from several code points."""

from __future__ import annotations

CONTROL = (
    "<|im_start|>user\nhow are you?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_end|><|im_end|>",
    "a<|endoftext|>b <|endoftext|> c",
    "<|im_start|",
    "<|im_start|><|im_start |>",
    "quote '<|im_end|>' it",
)
"""With control tokens of the ChatML family, whole and broken."""

DIGITS = (
    "7",
    "in 1999 or 2024?",
    "a  12 b   345 c    6789",
    "12345678901234567890",
    "-1.5e-10, +2E8; 0b1011 0o17 0xDEADBEEF",
    "1 000 000,00 or 1'000'000.00",
    "\t1\n2\r\n3",
    "x1y22z333",
    "½ cup, ²³ and Ⅻ, ٣٤٥, १२३, ９９",
    "  \n  42",
)

SPACES = (
    "",
    " ",
    "   ",
    "\n",
    "\r\n\r\n",
    "\n \n  \n",
    " \t \t",
    "end ",
    "end  \n",
    "  two before",
    "a\n\n\n\nb",
    "a\r\nb\rc\n",
    "\u00a0\u2003\u3000wide\u2028line\u2029para",
    "tabs\t\tand   spaces \t mixed  ",
    "\x0b\x0c\x85",
)

CODE = (
    "def f(a, *b, c=1, **d):\n\treturn [x for x in b if x != a] or {'c': c, **d}\n",
    "if (p->next && *p++ != '\\0') { x <<= 2; }  // done\n",
    "SELECT count(*) FROM t WHERE a>=10 AND b<>'x''y';",
    '<a href="x?y=1&amp;z=2">it\'s</a><!-- -->',
    'printf("%5.2f\\n", 3.14159);\n#define X(a) ((a)##_t)',
    "git commit -m 'fix: #42' && ./run.sh | tee ../out.log 2>&1",
    "λx.x ∘ ∀ε>0 ∃δ: |x−a|<δ ⇒ |f(x)−L|<ε",
    "snake_case camelCase PascalCase kebab-case SHOUT_CASE __init__",
)

WORDS = (
    "I'll, you've, HE'S, they'D, can't; 'tis o'clock rock'n'roll",
    "I’ll “quote” – dash — …",
    "naïve Ångström coöperate façade ŒUVRE ẞ",
    "cafe\u0301 A\u030a o\u0308\u0304 n\u0303 \u1100\u1161\u11a8",
    "Z\u0351\u036b\u0343a\u0326\u0321l\u0321\u0334g\u0322\u0321o\u0340",
    "ﬁ ﬂ ǆ ｆｕｌｌ",
    "ПРИВЕТ, как дела? Ёлка",
    "Ελληνικά ΣΊΣΥΦΟΣ",
)

SCRIPTS = (
    "今天天气不错，我们去公园吧！价格是３８元。",
    "日本語のテキスト、カタカナとひらがな。ﾊﾝｶｸ",
    "안녕하세요 세계 2024년",
    "مرحبا بالعالم ١٢٣ \u200fRTL\u200e",
    "שָׁלוֹם עולם",
    "นี่คือภาษาไทย ๑๒๓",
    "हिन्दी में क्षत्रिय",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𐍈 𠮷野家",
)

INVISIBLE = (
    "zero\u200bwidth\u200cjoin\u200der\ufeffbom",
    "\ufeffBOM first",
    "a\x00b\x01\x02\x7f",
    "soft\u00adhyphen\u2060",
    "\u202eoverride\u202c",
    "\U000e0041tag\U000e007f",
    "\ufffd\ufffe\U0010ffff\ue000",
)

EMOJI = (
    "🙂🙃",
    "👩🏽‍🚀 and 👨‍👩‍👧‍👦, flags 🇩🇪🇯🇵🇺🇳",
    "❤️ vs ❤, ☺︎, 1️⃣2️⃣#️⃣",
    " 🎉 party🎉! 100% 🔥🔥🔥",
)

RUNS = (
    "a" * 300,
    "ab" * 100,
    " " * 257,
    "\n" * 65,
    "=" * 80,
    "9" * 100,
    "!?" * 40,
    "é" * 50,
    "的" * 40,
    "😀" * 30,
    "x \n" * 30,
    "▁" * 5 + "▁a ▁b<0x41>",
    "Ġthe ĊĊ",
)

PLAIN = (*DIGITS, *SPACES, *CODE, *WORDS, *SCRIPTS, *INVISIBLE, *EMOJI, *RUNS)
CORPUS = (*PLAIN, *CONTROL)

SMOLLM2_IDS = {
    "7": "39",
    "in 1999 or 2024?": "254 216 33 41 41 41 355 216 34 32 34 36 47",
    "a  12 b   345 c    6789": "81 256 33 34 278 333 35 36 37 265 289 38 39 40 41",
    "12345678901234567890": "33 34 35 36 37 38 39 40 41 32 33 34 35 36 37 38 39 40 41 32",
    "\t1\n2\r\n3": "197 33 198 34 2738 35",
    "x1y22z333": "104 33 105 34 34 106 35 35 35",
    "  \n  42": "256 11181 36 34",
    " ": "216",
    "   ": "333",
    "\n": "198",
    "\r\n\r\n": "18682",
    "\n \n  \n": "198 3717 32057",
    " \t \t": "216 197 216 197",
    "end ": "486 216",
    "end  \n": "486 32057",
    "  two before": "216 827 1092",
    "a\n\n\n\nb": "81 16506 198 82",
    "a\r\nb\rc\n": "81 201 198 82 201 83 198",
    "\xa0\u2003\u3000wide\u2028line\u2029para": "15442 321 221 12109 218 3641 321 118 1311 321 119 39879",
    "tabs\t\tand   spaces \t mixed  ": "100 7366 197 197 397 256 5600 216 197 6468 256",
    "\x0b\x0c\x85": "199 200 141 223",
    "I\u2019ll \u201cquote\u201d \u2013 dash \u2014 \u2026": "57 417 764 619 31942 573 816 20740 1841 5548",
    "zero\u200bwidth\u200cjoin\u200der\ufeffbom": "13723 321 229 6930 321 230 4849 321 231 259 186 136 140 82 300",
    "\ufeffBOM first": "186 136 140 50 9232 808",
    "a\x00b\x01\x02\x7f": "81 190 82 191 192 217",
    "soft\xadhyphen\u2060": "7354 141 251 1724 18861 32571 250",
    "\u202eoverride\u202c": "321 123 41887 321 122",
    "\U000e0041tag\U000e007f": "188 250 219 219 9204 188 250 219 140",
    "\ufffd\ufffe\U0010ffff\ue000": "24211 23309 139 189 233 140 140 185 218 218",
    "\U0001f642\U0001f643": "10813 38887 10813 243 221",
    "<|im_end|><|im_end|>": "2 2",
    "a<|endoftext|>b <|endoftext|> c": "81 0 82 216 0 265",
    "<|im_start|": "44 108 306 79 3738 108",
    "<|im_start|><|im_start |>": "1 44 108 306 79 3738 2504 46",
    "quote '<|im_end|>' it": "31942 637 2 23 357",
    "================================================================================": "28909 6414",
    "\u0120the \u010a\u010a": "143 250 1195 24488 228 143 228",
}
"""Ids of SmolLM2's tokenizer with control tokens parsed, from a rebuild that agrees with llama.cpp on 186 other texts;
transformers gives the same once the digits are cut out by hand (its conversion from GGUF does not split them)."""
