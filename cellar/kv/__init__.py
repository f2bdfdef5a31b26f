"""The cellar itself: which chunk of which sequence lies where. Decides and accounts; moves no byte."""
