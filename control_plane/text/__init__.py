"""Where does text become token ids, and token ids text again?"""
