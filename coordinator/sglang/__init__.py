"""The plug-in for stock SGLang: installed beside it and with COORDINATOR_URL set, its rooms are shared.

SGLang loads it through the entry point `coordinator` of the group `sglang.srt.plugins`. Nothing here is imported by
the rest of the package.
"""
