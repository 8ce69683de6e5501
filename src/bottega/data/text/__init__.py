"""What is done to texts before they become tokens: cleaned, filtered, each kept once, and changed copies made."""
